"""The threads of a coordinator: reports of hangs, and their end."""

import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import CancelledError, ContextError, WorkerUnavailableError
from tests.parameter_server.coordinator.fakes import FakeStrategy, wait_for


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(("jaxdist-worker", "jaxdist-cl"))}


@pytest.fixture
def strategy() -> Iterator[FakeStrategy]:
    made = FakeStrategy(2)
    yield made
    if made._cluster_coordinator is not None:
        for link in made.links():
            link.is_back.set()
        made._cluster_coordinator._workers.stop()
        made._cluster_coordinator._workers.join(30)


@pytest.mark.parametrize("use", ["nothing", "closures", "error", "dataset", "lost"])
def test_all_threads_end_when_strategy_and_coordinator_are_deleted(use: str) -> None:
    before = _threads()
    strategy = FakeStrategy(2)
    coordinator = ClusterCoordinator(strategy)
    assert len(_threads() - before) == 3
    kept: list[object] = []
    if use == "closures":
        kept.append(coordinator.schedule(lambda: 1))
        coordinator.join()
    elif use == "error":
        kept.append(coordinator.schedule(lambda: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            coordinator.join()
    elif use == "dataset":
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
        kept += [iterator, coordinator.schedule(next, (iterator,))]
        coordinator.join()
    elif use == "lost":
        strategy.links()[0].failures = {1: WorkerUnavailableError("worker 0 has ended.")}
        strategy.links()[0].is_back.clear()
        while coordinator._workers.threads[0].lost_since is None:
            coordinator.schedule(lambda: 1).fetch()
    dead = weakref.ref(coordinator)
    if use == "error":
        # The traceback of the error has the frame of `join`.
        kept.clear()
    del strategy, coordinator
    gc.collect()
    assert dead() is None
    wait_for(lambda: not _threads() - before, "all threads have ended")
    del kept


def test_deleting_the_coordinator_cancels_what_waits() -> None:
    gate, began = threading.Event(), threading.Event()
    strategy = FakeStrategy(1)
    coordinator = ClusterCoordinator(strategy)

    def wait() -> int:
        began.set()
        gate.wait(30)
        return 1

    running = coordinator.schedule(wait)
    assert began.wait(30)
    waiting = coordinator.schedule(lambda: 2)
    link = strategy.links()[0]
    del strategy, coordinator
    gc.collect()
    with pytest.raises(CancelledError):
        waiting.fetch()
    wait_for(lambda: link.cancelled == {1})
    gate.set()
    assert running.fetch() == 1


def test_the_coordinator_may_be_deleted_in_any_thread_at_any_time() -> None:
    # The collector runs in workers too, while they have the lock of the queue.
    before = _threads()
    threshold = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(30):
            coordinator = ClusterCoordinator(FakeStrategy(2))
            for _ in range(20):
                coordinator.schedule(lambda: [[] for _ in range(10)])
    finally:
        gc.set_threshold(*threshold)
    del coordinator
    gc.collect()
    wait_for(lambda: not _threads() - before, "all threads have ended")


def test_schedule_after_the_threads_have_stopped_is_refused(strategy: FakeStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    coordinator._workers.stop()
    with pytest.raises(ContextError, match="after its workers had stopped"):
        coordinator.schedule(lambda: 1)


def test_a_stopped_worker_thread_does_not_wait_for_a_server_or_a_worker(
    strategy: FakeStrategy,
) -> None:
    coordinator = ClusterCoordinator(strategy)
    strategy.links()[0].is_back.clear()
    strategy.links()[0].failures = {1: WorkerUnavailableError("worker 0 has ended.")}
    while coordinator._workers.threads[0].lost_since is None:
        coordinator.schedule(lambda: 1).fetch()
    before = time.monotonic()
    coordinator._workers.stop()
    coordinator._workers.join(30)
    assert time.monotonic() - before < 10
    assert not any(t.thread.is_alive() for t in coordinator._workers.threads)


_PROGRAM = """
    import threading
    from jaxdist.coordinator import ClusterCoordinator
    from tests.parameter_server.coordinator.fakes import FakeStrategy
    strategy = FakeStrategy(2)
    coordinator = ClusterCoordinator(strategy)
    coordinator.join()
    began = threading.Event()
    def wait():
        began.set()
        threading.Event().wait()
    for _ in range({closures}):
        coordinator.schedule(wait)
    assert {closures} == 0 or began.wait(60)
    print("end", flush=True)
"""


@pytest.mark.parametrize("closures", [0, 5])
def test_the_end_of_the_process_does_not_wait_for_closures(closures: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM.format(closures=closures))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "end\n", "")


def test_a_closure_that_does_not_finish_is_reported_once_with_its_worker_and_stack(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXDIST_QUIET_SECONDS", "0.2")
    caplog.set_level(logging.WARNING, "jaxdist")
    strategy.links()[1].failures = {1: WorkerUnavailableError("worker 1 has ended.")}
    coordinator = ClusterCoordinator(strategy)
    strategy.links()[1].is_back.clear()
    while coordinator._workers.threads[1].lost_since is None:
        coordinator.schedule(lambda: 1).fetch()
    coordinator.join()
    gate = threading.Event()

    def wait_here() -> None:
        gate.wait(30)

    coordinator.schedule(wait_here)
    coordinator.schedule(wait_here)

    def reports() -> list[str]:
        return [r.getMessage() for r in caplog.records if "No function has" in r.getMessage()]

    wait_for(lambda: bool(reports()))
    time.sleep(0.5)  # Another report would come in this time.
    (text,) = reports()
    first, *rest = text.splitlines()
    assert first.startswith("No function has finished for 0.")
    assert first.endswith(" s, and 2 wait or run.")
    assert "(wait_here) for 0." in rest[0]
    assert rest[0].startswith("Worker 0 has been running function ")
    assert any("gate.wait(30)" in line for line in rest)
    assert rest[-1].startswith("Worker 1 was lost ")
    gate.set()
    coordinator.join()
    assert "Worker 0 runs no function." in coordinator_report(coordinator)


def coordinator_report(coordinator: ClusterCoordinator) -> str:
    """What the doctor would say now."""
    from jaxdist._parameter_server.coordinator.doctor import ClosureDoctor

    return ClosureDoctor(coordinator._workers).describe(1.0, 0)


def test_no_report_while_closures_finish_or_none_is_there(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAXDIST_QUIET_SECONDS", "0.3")
    caplog.set_level(logging.WARNING, "jaxdist")
    coordinator = ClusterCoordinator(strategy)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        coordinator.schedule(time.sleep, (0.02,)).fetch()
    time.sleep(0.7)  # A report would come in this time.
    assert not caplog.records
