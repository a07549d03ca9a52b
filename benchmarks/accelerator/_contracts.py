"""The contract tests of strategies, on the device: what holds for every strategy holds there."""

import collections
import io
import os
import pathlib
from collections.abc import Iterator
from contextlib import redirect_stdout

from benchmarks._lines import CountLine, Line, NoteLine

_ROOT = pathlib.Path(__file__).parents[2]
# `tests/strategies_under_test.py` reads it.
_ON_DEVICE = "JAXDIST_TESTS_ON_DEVICE"
_MOST_NAMED = 5


def contracts(is_smoke: bool) -> Iterator[Line]:
    """Run the tests that take a strategy with one device, and with virtual replicas on it.

    In this process, since an accelerator belongs to one at a time. It has to be the last row: the
    tests set options of JAX.
    """
    # Not at the top: pytest and the tests are needed for this row only.
    import pytest

    from tests.strategies.multi_worker import test_contracts as files
    from tests.strategies.multi_worker.contracts import takes_strategy

    everything = files.STRATEGIES + files.ACROSS + files.VALUES + files.COLLECTIVES + files.DATA
    chosen = files.SAMPLE if is_smoke else everything

    class Recorder:
        """Chooses the tests, and remembers how each has ended."""

        def __init__(self) -> None:
            self.outcomes: dict[str, str] = {}

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if takes_strategy(item)]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed or self.outcomes.get(report.nodeid, "passed") == "passed":
                self.outcomes[report.nodeid] = report.outcome

    recorder = Recorder()
    before = os.environ.get(_ON_DEVICE)
    os.environ[_ON_DEVICE] = "1"
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "300", *ignored]
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            pytest.main([*options, *(str(_ROOT / name) for name in chosen)], plugins=[recorder])
    finally:
        if before is None:
            del os.environ[_ON_DEVICE]
        else:
            os.environ[_ON_DEVICE] = before
    counts = collections.Counter(recorder.outcomes.values())
    failed = [name for name, outcome in recorder.outcomes.items() if outcome == "failed"]
    run = counts["passed"] + counts["failed"]
    yield CountLine(
        "contracts", f"{run} tests", "passed", "all", f"{counts['passed']}", f"{max(run, 1)}"
    )
    if counts["skipped"]:
        yield NoteLine("contracts", f"{counts['skipped']} tests were skipped")
    for name in failed[:_MOST_NAMED]:
        yield NoteLine("contracts", f"failed: {name}")
    if not run:
        yield NoteLine("contracts", f"pytest said: {said.getvalue().strip()[-300:]}")
