"""Workers and servers that are lost: every closure counts once, and all threads go on."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxdist._parameter_server.coordinator import Fence, WorkerLink
from jaxdist._parameter_server.coordinator.closure_queue import ClosureQueue
from jaxdist._parameter_server.coordinator.retries import Backoff, WaitSettings, note_server
from jaxdist._parameter_server.coordinator.scheduled import Scheduled
from jaxdist._parameter_server.coordinator.workers import WorkerThread
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import (
    ArgumentError,
    CancelledError,
    ClosureInputError,
    DeadlineExceededError,
    OutOfRangeError,
    PSUnavailableError,
    WorkerUnavailableError,
)
from tests.parameter_server.coordinator.fakes import (
    Counter,
    FakeLink,
    FakeStrategy,
    count_threads,
    wait_for,
)
from tests.tables import sampled

CLOSURES = 12
MAKERS: dict[str, Any] = {
    "worker": lambda: WorkerUnavailableError("worker 0 at h:1 has ended.", [0]),
    "server": lambda: PSUnavailableError("ps 1 at h:2 does not answer.", [1]),
    "deadline": lambda: DeadlineExceededError("ps 1 at h:2 has not answered for 60 s.", [1]),
    "user": lambda: ValueError("wrong"),
    "end": lambda: OutOfRangeError("no element"),
    "input": lambda: ClosureInputError("no dataset"),
    "cancelled": lambda: CancelledError("cancelled by somebody else"),
    "exit": lambda: SystemExit(3),
}
RETRIED = {"worker", "server", "deadline"}


class _StoreTimeoutError(DeadlineExceededError):
    """An error of a user's dataset, with an argument of its own."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard} does not answer")


def test_an_error_of_the_users_own_class_ends_the_closure_and_not_the_thread() -> None:
    item = Scheduled(None, "f", Fence())
    settings = dataclasses.replace(WaitSettings(), server_tries=1)
    made = note_server(item, 0, _StoreTimeoutError(3), settings)
    assert type(made) is DeadlineExceededError
    assert str(made).startswith("shard 3 does not answer\n\n")


def _name(row: Any) -> str:
    return "-".join(map(str, row))


# Error x before or after the change x which worker (both: "01") x at its k-th call.
ROWS = list(itertools.product(MAKERS, ["before", "after"], ["0", "1", "01"], [1, 2, 3, 6]))


@pytest.fixture(autouse=True)
def _quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    short = functools.partial(Backoff, 0.001)
    monkeypatch.setattr("jaxdist._parameter_server.coordinator.workers.Backoff", short)
    monkeypatch.setattr("jaxdist._parameter_server.coordinator.workers._ASK_SECONDS", 0.01)
    monkeypatch.setattr("jaxdist._parameter_server.coordinator.workers._NAP", 0.001)


@pytest.fixture
def strategy() -> Iterator[FakeStrategy]:
    made = FakeStrategy(2)
    yield made
    if made._cluster_coordinator is not None:
        workers = made._cluster_coordinator._workers
        for link in made.links():
            link.is_back.set()
        workers.stop()
        workers.join(30)
        assert count_threads(made._cluster_coordinator) == 0


def _step(meet: threading.Barrier) -> None:
    # So that each worker gets its share, and its link reaches the k-th call.
    with contextlib.suppress(threading.BrokenBarrierError):
        meet.wait(0.05)


@pytest.mark.parametrize("row", sampled(ROWS, 60, name=_name))
def test_each_closure_has_one_end_and_counts_at_most_once(
    strategy: FakeStrategy, row: tuple[str, str, str, int]
) -> None:
    kind, moment, workers, call = row
    coordinator = ClusterCoordinator(strategy)
    for index in map(int, workers):
        link = strategy.links()[index]
        link.after = moment == "after"
        link.failures = {call: MAKERS[kind]()}
    expected = type(MAKERS[kind]())
    raised: list[BaseException] = []
    meet = threading.Barrier(2)
    values: list[Any] = []
    for _ in range(CLOSURES):
        try:
            values.append(coordinator.schedule(_step, (meet,)))
        except expected as error:
            raised.append(error)
    try:
        coordinator.join()
    except expected as error:
        raised.append(error)
    coordinator.join()
    assert coordinator.done()
    found = coordinator.statistics()
    assert found.pending == 0
    assert found.scheduled == CLOSURES
    assert found.scheduled == found.applied + found.failed + found.cancelled
    happened = sum(not link.failures for link in strategy.links() if str(link.index) in workers)
    if kind in RETRIED:
        assert (found.applied, found.retried, raised) == (CLOSURES, happened, [])
        assert strategy.counter.value == CLOSURES
        assert strategy.counter.sent == CLOSURES + happened * (moment == "after")
    else:
        # The error of a closure that was asked to stop is no other error.
        assert 1 <= found.failed <= happened
        assert kind == "cancelled" or found.failed == happened
        assert 1 <= len(raised) <= happened
        own = happened if moment == "after" else 0
        assert strategy.counter.value == found.applied + own
    # Afterwards everything works, on both workers.
    meet = threading.Barrier(2)
    for link in strategy.links():
        link.failures.clear()
    again = [coordinator.schedule(lambda: meet.wait(30)) for _ in range(2)]
    assert sorted(coordinator.fetch(again)) == [0, 1]
    assert count_threads(coordinator) == 2


def test_a_worker_that_is_lost_leaves_its_closures_to_the_others_and_comes_back(
    strategy: FakeStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    first = strategy.links()[0]
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: list(range(100))))
    meet = threading.Barrier(2)

    def take(values: Any) -> Any:
        meet.wait(30)
        return next(values)

    values = [coordinator.schedule(take, (iterator,)) for _ in range(6)]
    assert sorted(coordinator.fetch(values)) == [0, 0, 1, 1, 2, 2]
    first.is_back.clear()
    first.failures = {len(first.calls) + n: MAKERS["worker"]() for n in (1,)}
    with caplog.at_level(logging.WARNING, "jaxdist"):
        values = []
        while coordinator._workers.threads[0].lost_since is None:
            values.append(coordinator.schedule(next, (iterator,)))
            coordinator.join()
    more = [coordinator.schedule(next, (iterator,)).fetch() for _ in range(3)]
    # The other worker goes on where it was.
    assert more == sorted(more)
    assert more[0] >= 3
    assert len(first.resources) == 2
    first.is_back.set()
    wait_for(lambda: len(first.resources) == 4)
    meet = threading.Barrier(2)
    values = coordinator.fetch([coordinator.schedule(take, (iterator,)) for _ in range(4)])
    # The dataset of the worker that was lost begins again.
    assert sorted(values)[:2] == [0, 1]
    assert sorted(values)[2:] == [more[-1] + 1, more[-1] + 2]
    assert coordinator.statistics().retried == 1
    assert "Worker 0 was lost: worker 0 at h:1 has ended." in caplog.text


def test_two_workers_are_lost_and_come_back(strategy: FakeStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    for link in strategy.links():
        link.failures = {1: MAKERS["worker"]()}
        link.is_back.clear()
    values = [coordinator.schedule(lambda: 1) for _ in range(5)]
    threads = coordinator._workers.threads
    wait_for(lambda: all(thread.lost_since is not None for thread in threads))
    assert not coordinator.done()
    strategy.links()[1].is_back.set()
    assert coordinator.fetch(values) == [1] * 5
    assert threads[0].lost_since is not None
    coordinator.join()


def test_join_raises_once_when_all_workers_are_lost_for_too_long(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_WORKER_SECONDS", "0.2")
    coordinator = ClusterCoordinator(strategy)
    for link in strategy.links():
        link.failures = {1: MAKERS["worker"]()}
        link.is_back.clear()
    value = coordinator.schedule(lambda: 1)
    other = coordinator.schedule(lambda: 1)
    with pytest.raises(WorkerUnavailableError, match=r"All workers have been lost for 0\.\d s: w"):
        coordinator.join()
    for one in (value, other):
        with pytest.raises(CancelledError):
            one.fetch()
    # While nothing waits there is no other error.
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 0.5)
    coordinator.join()
    for link in strategy.links():
        link.is_back.set()
    assert coordinator.schedule(lambda: 2).fetch() == 2


def test_the_time_of_lost_workers_begins_again_when_it_was_reported(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_WORKER_SECONDS", "0.5")
    coordinator = ClusterCoordinator(strategy)
    for link in strategy.links():
        link.failures = {1: MAKERS["worker"]()}
        link.is_back.clear()
    times = []
    for _ in range(2):
        for _ in range(2):
            coordinator.schedule(lambda: 1)
        with pytest.raises(WorkerUnavailableError, match="All workers have been lost"):
            coordinator.join()
        times.append(time.monotonic())
    assert times[1] - times[0] > 0.4


def test_a_closure_that_is_cancelled_before_it_begins_does_not_reach_the_worker(
    strategy: FakeStrategy,
) -> None:
    coordinator = ClusterCoordinator(strategy)
    coordinator._workers.stop()
    coordinator._workers.join(30)
    link, queue = FakeLink(0), ClosureQueue()
    coordinator._workers.queue = queue
    thread = WorkerThread(link, coordinator._workers)
    queue.put(item := Scheduled((len, [[]], {}), "len", Fence()))
    assert queue.get(link.cancel) is item
    item.is_cancelled = True
    thread._run(item)
    assert link.calls == []
    with pytest.raises(CancelledError):
        item.result.fetch()


def test_a_value_that_a_worker_has_made_is_not_made_again(strategy: FakeStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    link, thread = strategy.links()[0], coordinator._workers.threads[0]
    wait_for(lambda: len(link.resources) == 2)
    # As when a worker comes back while the value is created.
    thread.make(iterator)
    coordinator._queue.wake()
    wait_for(lambda: not thread._to_make)
    meet = threading.Barrier(2)
    coordinator.fetch([coordinator.schedule(lambda: meet.wait(30)) for _ in range(2)])
    assert len(link.resources) == 2


def test_a_closure_that_ends_every_worker_fails(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_WORKER_TRIES", "4")
    coordinator = ClusterCoordinator(strategy)

    def end() -> None:
        raise MAKERS["worker"]()

    value = coordinator.schedule(end)
    with pytest.raises(
        WorkerUnavailableError, match=r"function 1 \(end\) was running each of the 4"
    ):
        coordinator.join()
    with pytest.raises(WorkerUnavailableError, match="JAXDIST_WORKER_TRIES=8"):
        value.fetch()
    assert coordinator.statistics().retried == 3
    assert coordinator.schedule(lambda: 2).fetch() == 2


@pytest.mark.parametrize("kind", ["server", "deadline"])
def test_a_server_that_does_not_come_back_is_an_error_that_says_what_was_tried(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.3")
    coordinator = ClusterCoordinator(strategy)

    def step() -> None:
        raise MAKERS[kind]()

    coordinator.schedule(step)
    with pytest.raises(type(MAKERS[kind]()), match=r"ps 1 at h:2 .*\n\nfunction 1") as caught:
        coordinator.join()
    assert caught.value.processes == (1,)
    assert "JAXDIST_SERVER_SECONDS=0.6" in str(caught.value)
    assert str(caught.value).count("\n\n") == 2
    assert str(caught.value.__cause__).startswith("ps 1 at h:2")
    assert coordinator.schedule(lambda: 2).fetch() == 2


def test_the_number_of_tries_can_be_limited_as_in_tensorflow(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_TRIES", "3")
    coordinator = ClusterCoordinator(strategy)
    tries: list[int] = []

    def step() -> None:
        tries.append(1)
        raise MAKERS["server"]()

    coordinator.schedule(step)
    with pytest.raises(PSUnavailableError, match=r"tried 3 times since \d\d:\d\d:\d\d"):
        coordinator.join()
    assert len(tries) == 3


def test_workers_wait_for_a_server_and_go_on(strategy: FakeStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    is_back = threading.Event()
    tries: list[int] = []

    def step() -> int:
        tries.append(1)
        if not is_back.is_set():
            raise MAKERS["server"]()
        return 1

    values = [coordinator.schedule(step) for _ in range(5)]
    wait_for(lambda: len(tries) > 4)
    is_back.set()
    assert coordinator.fetch(values) == [1] * 5
    coordinator.join()


def test_an_error_that_comes_while_a_server_is_away_cancels_the_closure_that_waits(
    strategy: FakeStrategy,
) -> None:
    coordinator = ClusterCoordinator(strategy)
    tries: list[int] = []

    def wait() -> None:
        tries.append(1)
        raise MAKERS["server"]()

    waits = coordinator.schedule(wait)
    wait_for(lambda: len(tries) > 2)
    coordinator._queue.report_error(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        coordinator.join()
    with pytest.raises(CancelledError):
        waits.fetch()


@pytest.mark.parametrize("kind", ["server", "deadline", "worker"])
def test_making_a_dataset_is_tried_again(strategy: FakeStrategy, kind: str) -> None:
    coordinator = ClusterCoordinator(strategy)
    strategy.links()[0].resource_failures = [MAKERS[kind](), None, MAKERS[kind]()]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [7, 8]))
    meet = threading.Barrier(2)

    def take(values: Any) -> Any:
        meet.wait(30)
        return next(values)

    assert coordinator.fetch([coordinator.schedule(take, (iterator,)) for _ in range(2)]) == [7, 7]


def test_a_dataset_that_needs_a_server_fails_when_its_time_is_over(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_SECONDS", "0.05")
    coordinator = ClusterCoordinator(strategy)
    for link in strategy.links():
        link.resource_failures = [MAKERS["server"]() for _ in range(200)]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [7, 8]))
    coordinator.schedule(next, (iterator,))
    with pytest.raises(ClosureInputError, match="PSUnavailableError: ps 1 at h:2") as caught:
        coordinator.join()
    assert isinstance(caught.value.original_exception, PSUnavailableError)


class _Asked(FakeLink):
    def __init__(self, index: int, counter: Counter, answer: Callable[[float], bool]) -> None:
        super().__init__(index, counter)
        self._answer = answer

    def wait_until_back(self, seconds: float) -> bool:
        return self._answer(seconds)


def test_a_connection_that_raises_while_the_worker_is_lost_is_asked_again(
    strategy: FakeStrategy,
) -> None:
    answers: list[Any] = [OSError("no route"), MAKERS["server"](), False, True]

    def wait_until_back(seconds: float) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    link = _Asked(0, strategy.counter, wait_until_back)
    strategy._links[0] = link
    link.failures = {1: MAKERS["worker"]()}
    coordinator = ClusterCoordinator(strategy)
    while link.failures:
        coordinator.schedule(lambda: 1).fetch()
    wait_for(lambda: not answers and coordinator._workers.threads[0].lost_since is None)
    coordinator.join()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JAXDIST_SERVER_SECONDS", "soon"),
        ("JAXDIST_SERVER_SECONDS", "0"),
        ("JAXDIST_SERVER_TRIES", "1.5"),
        ("JAXDIST_WORKER_SECONDS", "nan"),
        ("JAXDIST_WORKER_TRIES", "-1"),
    ],
)
def test_a_setting_that_is_no_number_is_refused(
    strategy: FakeStrategy, monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ArgumentError, match=f"environment variable {variable} is '{text}'"):
        ClusterCoordinator(strategy)


def test_the_fake_has_all_that_a_link_has() -> None:
    link: WorkerLink = FakeLink(0)
    assert link.index == 0
