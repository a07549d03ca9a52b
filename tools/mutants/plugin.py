"""A plugin of pytest for runs with mutants: which tests run, and a log of what they did.

`JAXDIST_MUTANTS_LOG` names a file that gets one line of JSON when a test begins, and one after each
of its phases. `JAXDIST_MUTANTS_TESTS` names a file with the only tests to run, in their order.
"""

import json
import os
import pathlib
from typing import Any

import pytest


class _Log:
    def __init__(self, file: str) -> None:
        self._file = open(file, "a", buffering=1)

    def _write(self, *values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "begin", "started", 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report.nodeid, report.when, report.outcome, round(report.duration, 3))


class _Chosen:
    def __init__(self, file: str) -> None:
        self._places = {
            test: i for i, test in enumerate(json.loads(pathlib.Path(file).read_text()))
        }

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        left = [item for item in items if item.nodeid not in self._places]
        config.hook.pytest_deselected(items=left)
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places),
            key=lambda item: self._places[item.nodeid],
        )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register what does the work, in the process that pytest was started as."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_Log(os.environ["JAXDIST_MUTANTS_LOG"]))
    chosen = os.environ.get("JAXDIST_MUTANTS_TESTS")
    if chosen is not None:
        # To name tests would make them as long as in a run of all tests.
        os.environ["JAXDIST_TESTS"] = "short"
        config.pluginmanager.register(_Chosen(chosen))
