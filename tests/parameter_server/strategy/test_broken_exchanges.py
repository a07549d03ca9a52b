"""What a function raises if servers, workers or datasets fail while it is prepared or runs."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist._parameter_server.protocol import Changed, ChangeVariables
from jaxdist._parameter_server.server import TOO_STALE
from jaxdist._parameter_server.strategy import prepare, tasks
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import (
    ArgumentError,
    ContextError,
    DeadlineExceededError,
    WorkerUnavailableError,
)
from tests.parameter_server.strategy.making import make_strategy
from tests.parameter_server.wrapping import wrap
from tests.strategies.oracle import refused


def test_an_error_of_one_server_is_raised_when_all_have_replied() -> None:
    strategy = make_strategy(servers=2, workers=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        first, second = jaxdist.Variable(0.0), jaxdist.Variable(0.0)
    refused_one = threading.Event()
    replied = []

    def refuse(request: Any, go_on: Any) -> Any:
        refused_one.set()
        raise ArgumentError("planted")

    one, other = strategy.storage.links

    def change_after(request: Any, go_on: Any) -> Any:
        assert refused_one.wait(30)
        replied.append(go_on())
        return replied[0]

    one.call = wrap(one.call, ChangeVariables, refuse)  # type: ignore[method-assign]
    other.call = wrap(other.call, ChangeVariables, change_after)  # type: ignore[method-assign]

    def add() -> None:
        first.assign_add(1.0)
        second.assign_add(1.0)

    result = coordinator.schedule(add)
    with refused(ArgumentError, "planted"):
        result.fetch()
    assert [found.status for found in replied] == ["counted"]
    with refused(ArgumentError, "planted"):
        coordinator.join()


def test_a_function_whose_values_are_always_too_old_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXDIST_SERVER_TRIES", "1")
    strategy = make_strategy(servers=1, workers=1, max_staleness=2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        v = jaxdist.Variable(0.0)
    (server,) = strategy.storage.links
    asked = []

    def change(request: Any, go_on: Any) -> Changed:
        asked.append(request)
        return Changed(server.incarnation, {}, {}, status=TOO_STALE)

    server.call = wrap(server.call, ChangeVariables, change)  # type: ignore[method-assign]

    def add() -> None:
        v.assign_add(1.0)

    coordinator.schedule(add)
    with refused(
        DeadlineExceededError,
        "add was computed 100 times",
        "max_staleness=2",
        "Make max_staleness larger, or do less work in the function",
    ):
        coordinator.join()
    assert len(asked) == 100
    assert v.numpy() == 0


def test_a_dataset_that_no_worker_makes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = ClusterCoordinator(make_strategy())
    monkeypatch.setattr(prepare, "_SECONDS", 0.05)
    may_end = threading.Event()

    def make_slowly() -> list[np.ndarray]:
        may_end.wait(60)
        return [np.ones(2, "float32")]

    iterator = iter(coordinator.create_per_worker_dataset(make_slowly))
    with refused(
        DeadlineExceededError,
        "ClusterCoordinator.schedule waited 0.05 s for the dataset of a worker",
        "Look at what dataset_fn does, and whether any worker runs",
    ):
        coordinator.schedule(lambda iterator: next(iterator).sum(), (iterator,))
    may_end.set()
    monkeypatch.undo()
    assert coordinator.schedule(lambda it: next(it).sum(), (iterator,)).fetch() == 2


def test_another_batch_after_the_strategy_was_deleted_is_a_named_error() -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)

    def make_batches() -> Iterator[np.ndarray]:
        yield np.ones(2, "float32")

    def add_up(iterator: Any) -> Any:
        return next(iterator).sum()

    iterator = iter(coordinator.create_per_worker_dataset(make_batches))
    program = strategy.prepare(add_up, (iterator,), {}).program
    batch = np.ones(3, "float32")
    program.find([[batch]])
    del strategy, coordinator, iterator
    gc.collect()
    program.find([[batch]])
    with refused(ContextError, "its strategy was deleted", "until all functions have run"):
        program.find([[np.ones(4, "float32")]])


class _Link:
    """A worker that does not reply to the first greetings."""

    def __init__(self, lost: int) -> None:
        self.lost, self.greetings = lost, 0

    def hello(self) -> None:
        self.greetings += 1
        if self.greetings <= self.lost:
            raise WorkerUnavailableError("worker 0 at h:1 does not answer.", [0])


class _Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_worker_that_does_not_reply_is_waited_for_as_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = _Clock()
    monkeypatch.setattr(tasks, "time", clock)
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "60")
    late: Any = _Link(2)
    tasks._greet(late)
    assert late.greetings == 3
    clock.now = 0.0
    gone: Any = _Link(10**9)
    with refused(WorkerUnavailableError, "worker 0 at h:1 does not answer"):
        tasks._greet(gone)
    assert 60 <= clock.now < 61
