"""The contract tests of strategies, run by all processes of a job together.

Each process runs the same tests in the same order, and the processes meet after each test. Only
tests that take the fixture `strategy` or `strategy_row` are run: they hold for every strategy.
The others make strategies of one process. Rows that run op by op are left out, since one process
runs all replicas then; `test_calls.py` has the error for that.
"""

import json
import os
import pathlib
from collections.abc import Sequence

import jax
import pytest

import jaxdist
from jaxdist._processes import get_agreement
from jaxdist._strategies import multi_worker

ROOT = pathlib.Path(__file__).parents[3]


class _Recorder:
    """Chooses the tests, remembers how each has ended, and lets the processes meet between them."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if takes_strategy(item)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = str(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            before = self.outcomes.get(report.nodeid, "")
            self.outcomes[report.nodeid] = f"{before}\n{report.longrepr}".strip()
        elif report.skipped:
            self.outcomes[report.nodeid] = f"skipped: {report.longrepr}"
        else:
            self.outcomes.setdefault(report.nodeid, "")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        agreement = get_agreement()
        assert agreement is not None
        # A test that fails in one process only leaves the counts of exchanges different, so that
        # all later tests would fail as well.
        counts = agreement._counts
        own = json.dumps({"test": item.nodeid, "counts": counts})
        texts = agreement.gather("test", own, 60, purpose="the end of a test")
        said = [json.loads(text) for text in texts]
        assert {one["test"] for one in said} == {item.nodeid}, said
        for channel in {c for one in said for c in one["counts"]} - {"test"}:
            counts[channel] = max(one["counts"].get(channel, 0) for one in said)


def run_contracts(tests: Sequence[str], in_turn: bool = False) -> dict[str, str]:
    """Run the contract tests of these files; return what went wrong with each, "" if nothing.

    `in_turn`: the processes have the replicas in turn, as on slices whose replicas follow rows of
    chips; see Note [Order of chips].
    """
    if in_turn:
        multi_worker._list_devices_of_all = _list_in_turn
    layout = jaxdist.MultiWorkerMirroredStrategy().layout
    if in_turn:
        assert layout.local_replicas[:2] == (layout.process.index, layout.process.index + 2)
    recorder = _Recorder()
    os.chdir(ROOT)
    # The plugin that records raised errors is there before pytest is.
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "60", *ignored]
    pytest.main([*options, *tests], plugins=[recorder])
    return recorder.outcomes


def _list_in_turn() -> list[jax.Device]:
    """Return the first device of each process, then the second of each."""
    by_process = [jax.local_devices(index) for index in range(jax.process_count())]
    return [device for together in zip(*by_process, strict=True) for device in together]


def takes_strategy(item: pytest.Item) -> bool:
    """Whether a test holds for every strategy."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and "strategy_row" in callspec.params
