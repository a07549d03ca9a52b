"""The queue of closures: its counts, its first error, and threads."""

import collections
import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxdist._parameter_server.coordinator import Fence
from jaxdist._parameter_server.coordinator.closure_queue import MOST_CLOSURES, ClosureQueue
from jaxdist._parameter_server.coordinator.scheduled import FinishedNumbers, Scheduled
from jaxdist.errors import CancelledError, ContextError
from tests.parameter_server.coordinator.fakes import wait_for
from tests.tables import examples


def _make() -> Scheduled:
    return Scheduled(None, "step", Fence())


def _ignore(number: int) -> None:
    pass


def _in_thread(function: Any, *args: Any) -> "collections.deque[Any]":
    """Call a function in a thread; its result, or its error, appears in the deque."""
    found: collections.deque[Any] = collections.deque()

    def call() -> None:
        try:
            found.append(function(*args))
        except BaseException as error:
            found.append(error)

    threading.Thread(target=call, daemon=True).start()
    return found


@given(st.permutations(range(1, 30)))
@settings(max_examples=examples(30), deadline=None)
def test_all_numbers_below_the_watermark_are_finished(order: list[int]) -> None:
    finished = FinishedNumbers()
    seen: set[int] = set()
    for number in order:
        finished.add(number)
        seen.add(number)
        assert set(range(1, finished.below)) <= seen
        assert finished.below not in seen
    assert finished.below == 30


def test_262144_closures_may_wait() -> None:
    assert ClosureQueue()._most == MOST_CLOSURES == 262144


def test_numbers_follow_the_order_of_put() -> None:
    queue = ClosureQueue()
    for _ in range(3):
        queue.put(_make())
    taken = [queue.get(_ignore) for _ in range(3)]
    assert [item.number for item in taken if item] == [1, 2, 3]


def test_a_closure_that_is_put_back_keeps_its_number_and_is_the_next_one() -> None:
    queue = ClosureQueue()
    items = [_make(), _make()]
    for item in items:
        queue.put(item)
    first = queue.get(_ignore)
    assert first is items[0]
    assert queue.put_back(first)
    assert queue.get(_ignore) is first
    assert first.number == 1
    assert queue.counts.retried == 1


def test_put_waits_for_a_free_slot() -> None:
    queue = ClosureQueue(most=2)
    queue.put(_make())
    queue.put(_make())
    blocked = _in_thread(queue.put, _make())
    wait_for(lambda: queue._blocked == 1)
    assert not blocked
    assert queue.get(_ignore) is not None
    wait_for(lambda: len(blocked) == 1)
    assert blocked[0] is None


def test_put_that_waits_for_a_slot_raises_the_error_of_a_worker() -> None:
    queue = ClosureQueue(most=1)
    queue.put(_make())
    running = queue.get(_ignore)
    assert running is not None
    queue.put(_make())
    late = _make()
    blocked = _in_thread(queue.put, late)
    wait_for(lambda: queue._blocked == 1)
    queue.report_error(error := ArithmeticError("lost"))
    wait_for(lambda: running.is_cancelled)
    queue.finish(running)
    wait_for(lambda: len(blocked) == 1)
    assert blocked[0] is error
    with pytest.raises(CancelledError):
        late.result.fetch()
    assert queue.is_done()


def test_wait_raises_the_first_error_once_and_the_queue_works_again() -> None:
    queue = ClosureQueue()
    items = [_make() for _ in range(4)]
    for item in items:
        queue.put(item)
    first, second = queue.get(_ignore), queue.get(_ignore)
    assert first is items[0]
    assert second is items[1]
    queue.fail(first, ValueError("first"))
    queue.fail(second, ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        queue.wait()
    for item in items[2:]:
        with pytest.raises(CancelledError, match=r"function \d .step. was cancelled.*Please resch"):
            item.result.fetch()
    queue.wait()
    assert queue.is_done()
    queue.put(again := _make())
    assert queue.get(_ignore) is again
    assert again.number == 5
    assert not queue.is_done()
    queue.finish(again)
    assert queue.is_done()
    assert queue.finished.below == 6


def test_what_runs_is_asked_to_stop_and_waited_for_before_the_error_is_raised() -> None:
    queue = ClosureQueue()
    for _ in range(3):
        queue.put(_make())
    asked: list[int] = []
    first, second = queue.get(asked.append), queue.get(asked.append)
    assert first is not None
    assert second is not None
    queue.fail(first, ValueError("wrong"))
    found = _in_thread(queue.wait)
    wait_for(lambda: asked == [2])
    # No other closure starts meanwhile, and a new one waits.
    scheduled = _in_thread(queue.put, _make())
    wait_for(lambda: queue._blocked == 1)
    getting = _in_thread(queue.get, _ignore)
    wait_for(lambda: queue._idle == 1)
    assert not found
    queue.fail(second, CancelledError("stopped"))
    wait_for(lambda: len(found) == 1 and len(scheduled) == 1 and len(getting) == 1)
    assert isinstance(found[0], ValueError)
    assert scheduled[0] is None
    assert getting[0].number == 4
    assert (queue.counts.failed, queue.counts.cancelled) == (1, 2)


def test_a_worker_that_is_gone_cannot_be_asked_to_stop() -> None:
    queue = ClosureQueue()

    def fail(number: int) -> None:
        raise OSError("gone")

    for _ in range(2):
        queue.put(_make())
    first, second = queue.get(fail), queue.get(fail)
    assert first is not None
    assert second is not None
    queue.fail(first, ValueError("wrong"))
    found = _in_thread(queue.is_done)
    wait_for(lambda: second.is_cancelled)
    assert not queue.put_back(second)
    wait_for(lambda: len(found) == 1)
    assert isinstance(found[0], ValueError)


def test_two_threads_that_wait_get_one_error() -> None:
    queue = ClosureQueue()
    for _ in range(2):
        queue.put(_make())
    first, second = queue.get(_ignore), queue.get(_ignore)
    assert first is not None
    assert second is not None
    queue.fail(first, ValueError("wrong"))
    found = [_in_thread(queue.wait), _in_thread(queue.is_done)]
    wait_for(lambda: second.is_cancelled)
    queue.finish(second)
    wait_for(lambda: all(found))
    assert sum(isinstance(one[0], ValueError) for one in found) == 1


def test_wait_does_not_wait_for_closures_that_come_later() -> None:
    queue = ClosureQueue()
    queue.put(_make())
    first = queue.get(_ignore)
    assert first is not None
    found = _in_thread(queue.wait)
    wait_for(lambda: queue._targets == [1])
    queue.put(_make())
    queue.finish(first)
    wait_for(lambda: len(found) == 1)
    assert found[0] is None
    assert not queue.is_done()


def test_a_worker_with_other_work_leaves_the_closure_to_another_one() -> None:
    queue = ClosureQueue()
    others: list[int] = []
    busy = _in_thread(queue.get, _ignore, others)
    wait_for(lambda: queue._idle == 1)
    free = _in_thread(queue.get, _ignore)
    wait_for(lambda: queue._idle == 2)
    others.append(1)
    # It notifies the thread that has waited longest: the one with other work.
    queue.put(item := _make())
    wait_for(lambda: len(busy) == 1 and len(free) == 1)
    assert busy[0] is None
    assert free[0] is item


def test_after_stop_everything_is_cancelled_and_nobody_waits() -> None:
    queue = ClosureQueue(most=2)
    items = [_make() for _ in range(3)]
    for item in items[:2]:
        queue.put(item)
    asked: list[int] = []
    running = queue.get(asked.append)
    assert running is not None
    queue.put(items[2])
    blocked = _in_thread(queue.put, _make())
    wait_for(lambda: queue._blocked == 1)
    queue.stop()
    assert asked == [1]
    wait_for(lambda: len(blocked) == 1)
    assert isinstance(blocked[0], ContextError)
    assert queue.get(_ignore) is None
    for item in items[1:]:
        with pytest.raises(CancelledError):
            item.result.fetch()
    assert not queue.put_back(running)
    queue.wait()


class _Model(RuleBasedStateMachine):
    """Random calls of one thread; the queue has to agree with lists."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ClosureQueue(most=5)
        self.queued: list[Scheduled] = []
        self.running: list[Scheduled] = []
        self.ended: set[int] = set()
        self.error: BaseException | None = None
        self.count = 0

    @precondition(lambda self: self.error is None and len(self.queued) < 5)
    @rule()
    def put(self) -> None:
        self.queue.put(item := _make())
        self.count += 1
        assert item.number == self.count
        self.queued.append(item)

    @precondition(lambda self: bool(self.queued))
    @rule()
    def get(self) -> None:
        item = self.queue.get(_ignore)
        assert item is self.queued.pop(0)
        self.running.append(item)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "put_back"]))
    def end(self, data: Any, how: str) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.running.remove(item)
        if how == "put_back":
            assert self.queue.put_back(item) == (self.error is None)
            if self.error is None:
                self.queued.insert(0, item)
                return
        elif how == "fail":
            error = ValueError(str(item.number))
            self.queue.fail(item, error)
            self.error = self.error or error
        else:
            self.queue.finish(item)
        self.ended.add(item.number)

    @precondition(lambda self: self.error is not None and not self.running)
    @rule(how=st.sampled_from(["put", "wait", "is_done"]))
    def raise_error(self, how: str) -> None:
        new = [_make()] if how == "put" else []
        if len(self.queued) == 5 and new:
            return  # It would raise without a number.
        with pytest.raises(ValueError, match=str(self.error)):
            getattr(self.queue, how)(*new)
        self.count += len(new)
        for item in [*self.queued, *new]:
            self.ended.add(item.number)
            with pytest.raises(CancelledError):
                item.result.fetch()
        self.queued, self.error = [], None

    @precondition(lambda self: self.error is None)
    @rule()
    def done(self) -> None:
        assert self.queue.is_done() == (not self.queued and not self.running)

    @invariant()
    def agrees(self) -> None:
        counts, pending = self.queue.read_counts()
        assert pending == len(self.queued) + len(self.running)
        assert set(self.queue.in_flight) == {item.number for item in self.running}
        assert counts.applied + counts.failed + counts.cancelled == len(self.ended)
        assert counts.scheduled == self.count == len(self.ended) + pending
        below = self.queue.finished.below
        assert set(range(1, below)) <= self.ended
        assert below not in self.ended


TestModel = _Model.TestCase
TestModel.settings = settings(max_examples=examples(60), deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_ten_threads_put_while_others_finish_fail_and_put_back(seed: int) -> None:
    queue = ClosureQueue(most=20)
    raised: list[str] = []
    items: list[Scheduled] = []
    chance = random.Random(seed)
    stopping = threading.Event()

    def work() -> None:
        while not stopping.is_set():
            item = queue.get(_ignore)
            if item is None:
                return
            what = chance.random()
            if what < 0.1:
                error = ValueError(str(item.number))
                queue.fail(item, error)
                item.result.set_error(error)
            elif what < 0.4:
                if not queue.put_back(item):
                    item.result.set_error(CancelledError("stopped"))
            else:
                queue.finish(item)
                item.result.set_value(item.number)

    def schedule() -> None:
        for _ in range(100):
            item = _make()
            items.append(item)
            try:
                queue.put(item)
            except ValueError as error:
                raised.append(str(error))

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    putters = [threading.Thread(target=schedule, daemon=True) for _ in range(10)]
    for thread in [*workers, *putters]:
        thread.start()
    for thread in putters:
        thread.join(60)
        assert not thread.is_alive()
    try:
        queue.wait()
    except ValueError as error:
        raised.append(str(error))
    assert queue.is_done()
    queue.stop()
    for thread in workers:
        thread.join(60)
        assert not thread.is_alive()
    counts, pending = queue.read_counts()
    assert pending == 0
    assert counts.scheduled == 1000 == counts.applied + counts.failed + counts.cancelled
    assert queue.finished.below == 1001
    assert sorted(item.number for item in items) == list(range(1, 1001))
    # Each error was raised at most once, and each result has exactly one end.
    assert len(set(raised)) == len(raised) > 0
    assert all(item.result.is_ready() for item in items)
