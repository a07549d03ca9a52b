"""The contract tests of strategies, run by every process of a job."""

import os
import pathlib

import pytest

import jaxdist
from jaxdist._processes import get_agreement

ROOT = pathlib.Path(__file__).parents[3]


class _Recorder:
    """Remembers how each test has ended, and lets the processes meet between tests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid):
        d = os.environ.get("JAXDIST_CONTRACT_LOG")
        if d:
            import jax, time
            with open(f"{d}/{jax.process_index()}.log", "a") as f: f.write(f"START {time.time():.1f} {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = str(report.longrepr)
            d = os.environ.get("JAXDIST_CONTRACT_LOG")
            if d:
                import jax
                with open(f"{d}/{jax.process_index()}.log", "a") as f: f.write(f"{report.when} {report.longrepr}\n")
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(report.nodeid, "")

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        agreement = get_agreement()
        if agreement is not None:
            said = agreement.gather("test", item.nodeid, 60, purpose="the end of a test")
            assert len({*said}) == 1, said


def run_contracts() -> dict[str, str]:
    """Run the tests of `CONTRACTS`; return the error of each, empty for those that pass."""
    jaxdist.MultiWorkerMirroredStrategy()
    recorder = _Recorder()
    os.chdir(ROOT)
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "20",
        *os.environ.get("MORE", "").split(),
    ]
    pytest.main([*arguments, *os.environ["CONTRACTS"].split()], plugins=[recorder])
    return recorder.outcomes
