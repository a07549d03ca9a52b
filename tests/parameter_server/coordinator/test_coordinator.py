"""`ClusterCoordinator` with workers in this process."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CallArgumentsError,
    CancelledError,
    ClosureInputError,
    ContextError,
    OutOfRangeError,
    UnsupportedError,
)
from tests.parameter_server.coordinator.fakes import SECONDS, FakeLink, FakeStrategy, wait_for


@pytest.fixture
def strategy() -> Iterator[FakeStrategy]:
    made = FakeStrategy(2)
    yield made
    if made._cluster_coordinator is not None:
        made._cluster_coordinator._workers.stop()
        made._cluster_coordinator._workers.join(30)


@pytest.fixture
def coordinator(strategy: FakeStrategy) -> ClusterCoordinator:
    return ClusterCoordinator(strategy)


def _double(x: Any) -> Any:
    return {"a": (2 * x, 3), "b": None}


def _fail(text: str = "wrong") -> None:
    raise ValueError(text)


def test_a_strategy_has_one_coordinator(strategy: FakeStrategy) -> None:
    first = ClusterCoordinator(strategy)
    assert ClusterCoordinator(strategy) is first
    assert first.strategy is strategy


def test_a_strategy_without_workers_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"given strategy=.*object(?s:.*)strategy\.run"):
        ClusterCoordinator(object())  # pyrefly: ignore[bad-argument-type]


def test_results_have_the_structure_of_what_the_function_returned(
    coordinator: ClusterCoordinator,
) -> None:
    value = coordinator.schedule(_double, args=(np.ones(2),))
    assert isinstance(value, RemoteValue)
    found = value.fetch()
    np.testing.assert_array_equal(found["a"][0], [2, 2])
    assert found["a"][1] == 3
    assert found["b"] is None
    got = value.get()
    assert isinstance(got["a"][0], jax.Array)
    assert repr(value).startswith("RemoteValue({'a'")
    assert coordinator.schedule(lambda: None).fetch() is None


def test_keyword_arguments_reach_the_function(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda a, b: a - b, (5,), {"b": 2})
    assert value.fetch() == 3


def test_fetch_maps_over_a_structure_and_leaves_other_values(
    coordinator: ClusterCoordinator,
) -> None:
    value = coordinator.schedule(lambda: np.float32(4))
    assert coordinator.fetch({"a": 3, "b": [value, None]}) == {"a": 3, "b": [4.0, None]}
    assert coordinator.fetch(value) == 4
    assert coordinator.fetch("text") == "text"


def test_what_is_scheduled_runs_while_the_program_goes_on(coordinator: ClusterCoordinator) -> None:
    gate = threading.Event()
    values = [coordinator.schedule(gate.wait, (30,)) for _ in range(5)]
    assert not coordinator.done()
    assert repr(values[0]) == "RemoteValue(not ready)"
    assert coordinator.statistics().pending == 5
    gate.set()
    coordinator.join()
    assert coordinator.done()
    assert coordinator.fetch(values) == [True] * 5
    found = coordinator.statistics()
    assert (found.scheduled, found.applied, found.pending) == (5, 5, 0)


def test_statistics_have_what_the_servers_report(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    for _ in range(3):
        coordinator.schedule(lambda: None)
    coordinator.join()
    strategy.report_changes({0: 2, 1: 1}, lost=1)
    found = coordinator.statistics()
    assert (found.applied, found.lost, found.staleness) == (2, 1, {0: 2, 1: 1})


@pytest.mark.parametrize("how", ["join", "done", "schedule"])
def test_the_first_error_is_raised_once_by(coordinator: ClusterCoordinator, how: str) -> None:
    values = [coordinator.schedule(_fail, ("first",))]
    wait_for(lambda: coordinator._queue._error is not None)
    call = {"schedule": lambda: coordinator.schedule(lambda: None)}.get(
        how, getattr(coordinator, how)
    )
    with pytest.raises(ValueError, match="first"):
        call()
    coordinator.join()
    assert coordinator.done()
    # The result of the closure that failed goes on raising.
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            values[0].fetch()
    assert repr(values[0]) == "RemoteValue(ValueError)"
    assert coordinator.schedule(lambda: 7).fetch() == 7


def test_after_an_error_what_runs_is_stopped_and_what_waits_is_cancelled(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    links = strategy.links()
    began = threading.Event()

    def loop() -> None:
        began.set()
        while True:
            links[experimental_get_current_worker_index()].check()

    running = coordinator.schedule(loop)
    assert began.wait(30)
    failed = coordinator.schedule(_fail)
    wait_for(lambda: coordinator._queue._error is not None)
    with pytest.raises(ValueError, match="wrong"):
        coordinator.join()
    with pytest.raises(CancelledError, match="Please reschedule"):
        running.fetch()
    with pytest.raises(ValueError, match="wrong"):
        failed.fetch()
    found = coordinator.statistics()
    assert (found.failed, found.cancelled, found.pending) == (1, 1, 0)


def test_of_31_closures_one_of_which_fails_each_has_one_end(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    gate = threading.Event()
    for _ in range(30):
        coordinator.schedule(gate.wait, (30,))
    coordinator.schedule(_fail)
    gate.set()
    with pytest.raises(ValueError, match="wrong"):
        coordinator.join()
    found = coordinator.statistics()
    assert found.scheduled == found.applied + found.cancelled + found.failed
    assert found.failed == 1
    assert strategy.counter.value == found.applied


def test_a_traceback_does_not_grow_with_each_fetch(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(_fail)
    lengths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="wrong") as caught:
            value.fetch()
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    with pytest.raises(ValueError, match="wrong"):
        coordinator.join()


def test_sys_exit_in_a_function_is_raised_by_join(coordinator: ClusterCoordinator) -> None:
    coordinator.schedule(lambda: (_ for _ in ()).throw(SystemExit(3)))
    with pytest.raises(SystemExit):
        coordinator.join()
    assert coordinator.schedule(lambda: 1).fetch() == 1


def test_a_function_that_raises_cancelled_error_itself_has_failed(
    coordinator: ClusterCoordinator,
) -> None:
    def stop() -> None:
        raise CancelledError("mine\n\nrule\n\nremedy")

    coordinator.schedule(stop)
    with pytest.raises(CancelledError, match="mine"):
        coordinator.join()
    assert coordinator.statistics().failed == 1


def test_the_fence_increases_at_join_done_and_first_fetch(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    calls: list[int] = []

    def next_fence() -> int:
        value = coordinator.schedule(lambda: None)
        wait_for(lambda: value.is_ready())
        calls.append(max(call.fence for link in strategy.links() for call in link.calls))
        return calls[-1]

    assert next_fence() == next_fence() == 0
    coordinator.join()
    assert next_fence() == 1
    coordinator.done()
    assert next_fence() == 2
    value = coordinator.schedule(lambda: None)
    for _ in range(3):
        value.fetch()
    assert next_fence() == 3
    strategy._fence.advance()
    assert next_fence() == 4


def test_workers_hear_which_closures_are_finished(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    for _ in range(5):
        coordinator.schedule(lambda: None)
        coordinator.join()
    calls = sorted((c.number, c.done_below) for link in strategy.links() for c in link.calls)
    assert calls == [(n, n) for n in range(1, 6)]


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        (5, None, CallArgumentsError),
        (np.ones(3), None, CallArgumentsError),
        ((), [1], CallArgumentsError),
        (({1: 2, "a": 3},), None, ArgumentError),
        ((), {"a": {1: 2, "a": 3}}, ArgumentError),
    ],
)
def test_schedule_refuses(
    coordinator: ClusterCoordinator, args: Any, kwargs: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"ClusterCoordinator\.schedule was given"):
        coordinator.schedule(lambda *_: None, args, kwargs)


def test_schedule_refuses_the_result_of_a_call(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(ArgumentTypeError, match=r"fn=3(?s:.*)not coordinator\.schedule\(step\("):
        coordinator.schedule(3)  # pyrefly: ignore[bad-argument-type]


def test_a_remote_value_is_no_argument(coordinator: ClusterCoordinator) -> None:
    value = coordinator.schedule(lambda: 1)
    for call in [((value,), None), (({"a": [value]},), None), ((), {"x": value})]:
        with pytest.raises(ArgumentError, match=r"contains RemoteValue\(.*\)\.\n"):
            coordinator.schedule(lambda x: None, *call)


class _Broken:
    """A pytree node that cannot be flattened."""


def _refuse(node: _Broken) -> Any:
    raise TypeError("cannot be flattened")


jax.tree_util.register_pytree_node(_Broken, _refuse, lambda *_: _Broken())


def test_the_error_of_a_pytree_node_stays_as_it_is(coordinator: ClusterCoordinator) -> None:
    with pytest.raises(TypeError, match="cannot be flattened"):
        coordinator.fetch([_Broken()])
    with pytest.raises(TypeError, match="cannot be flattened"):
        coordinator.schedule(lambda x: x, (_Broken(),))


def test_fetch_refuses_what_is_not_its_own(coordinator: ClusterCoordinator) -> None:
    other = FakeStrategy(1)
    value = ClusterCoordinator(other).schedule(lambda: 1)
    with pytest.raises(ArgumentError, match="another coordinator"):
        coordinator.fetch([value])
    assert value.fetch() == 1
    dataset = coordinator.create_per_worker_dataset(lambda: [1])
    with pytest.raises(ArgumentError, match=r"given PerWorkerDataset\(workers="):
        coordinator.fetch({"a": dataset})
    with pytest.raises(ArgumentError, match="dict with the keys"):
        coordinator.fetch({1: value, "a": 2})


@pytest.mark.parametrize("method", ["schedule", "join", "done", "fetch"])
def test_a_function_on_a_worker_cannot_call(coordinator: ClusterCoordinator, method: str) -> None:
    arguments = {"schedule": [len], "fetch": [3]}.get(method, [])
    coordinator.schedule(lambda: getattr(coordinator, method)(*arguments))
    with pytest.raises(ContextError, match=rf"{method} was called in a function that runs on a w"):
        coordinator.join()
    coordinator.schedule(lambda: coordinator.create_per_worker_dataset(lambda: [1]))
    with pytest.raises(ContextError, match="create_per_worker_dataset was called in a function"):
        coordinator.join()


def test_a_function_knows_the_index_of_its_worker(coordinator: ClusterCoordinator) -> None:
    meet = threading.Barrier(2)

    def index() -> Any:
        meet.wait(30)
        return experimental_get_current_worker_index()

    values = [coordinator.schedule(index) for _ in range(2)]
    assert sorted(coordinator.fetch(values)) == [0, 1]
    with pytest.raises(ContextError, match="outside of a function that runs on"):
        experimental_get_current_worker_index()


def _meet(meet: threading.Barrier, iterator: Any) -> Any:
    meet.wait(30)
    return next(iterator)


def test_each_worker_has_its_own_dataset_and_calls_the_function_once(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    made: list[Any] = []

    def make() -> list[int]:
        index = experimental_get_current_worker_index()
        made.append(index)
        return [10 * index + i for i in range(3)]

    dataset = coordinator.create_per_worker_dataset(make)
    first, second = iter(dataset), iter(dataset)
    assert iter(first) is first
    meet = threading.Barrier(2)
    values = [coordinator.schedule(_meet, (meet, first)) for _ in range(4)]
    assert sorted(coordinator.fetch(values)) == [0, 1, 10, 11]
    values = [coordinator.schedule(_meet, (meet, second)) for _ in range(2)]
    assert sorted(coordinator.fetch(values)) == [0, 10]
    assert sorted(made) == [0, 1]
    coordinator.join()


def test_the_end_of_an_iterator_is_an_out_of_range_error(coordinator: ClusterCoordinator) -> None:
    def take(iterator: Any) -> Any:
        try:
            return next(iterator)
        except StopIteration:
            raise OutOfRangeError("no element\n\nis\n\nleft") from None

    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1]))
    value = coordinator.schedule(lambda x: [take(x), take(x)], (iterator,))
    with pytest.raises(OutOfRangeError):
        coordinator.join()
    with pytest.raises(OutOfRangeError):
        value.fetch()
    coordinator.join()


@pytest.mark.parametrize("how", ["join", "schedule"])
def test_a_dataset_that_cannot_be_made_is_an_error_of_the_closure_that_needs_it(
    coordinator: ClusterCoordinator, how: str
) -> None:
    def make() -> Any:
        raise OSError("no file")

    iterator = iter(coordinator.create_per_worker_dataset(make))
    coordinator.join()  # An input that is not used is no error.
    value = coordinator.schedule(next, (iterator,))
    wait_for(lambda: coordinator._queue._error is not None)
    with pytest.raises(ClosureInputError, match="OSError: no file") as caught:
        coordinator.join() if how == "join" else coordinator.schedule(len)
    assert isinstance(caught.value.original_exception, OSError)
    with pytest.raises(ClosureInputError):
        value.fetch()
    good = iter(coordinator.create_per_worker_dataset(lambda: [5]))
    assert coordinator.schedule(next, (good,)).fetch() == 5


def test_values_that_nobody_needs_any_more_are_freed(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: [1])
    for _ in range(50):
        coordinator.schedule(next, (iter(dataset),))
    coordinator.join()
    wait_for(lambda: len(coordinator._workers.list_values()) <= 2)


def test_batches_of_workers_are_not_on_the_coordinator(coordinator: ClusterCoordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: [1])
    with pytest.raises(UnsupportedError, match=r"Pass the iterator in args"):
        next(iter(dataset))
    with pytest.raises(ContextError, match="while a function is traced"):
        jax.jit(lambda x: [iter(dataset), x][1])(jnp.ones(2))


def test_a_worker_that_joins_takes_closures_and_makes_the_datasets(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    strategy.new_workers.to_add.append(FakeLink(2, strategy.counter))
    assert coordinator.add_worker() == 2
    meet = threading.Barrier(3)
    values = [coordinator.schedule(_meet, (meet, iterator)) for _ in range(3)]
    assert coordinator.fetch(values) == [1, 1, 1]


def test_a_worker_that_announces_itself_takes_closures_and_makes_the_datasets(
    strategy: FakeStrategy, coordinator: ClusterCoordinator
) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2, 3]))
    meet = threading.Barrier(3)
    values = [coordinator.schedule(_meet, (meet, iterator)) for _ in range(3)]
    strategy.new_workers.announced.append(FakeLink(2, strategy.counter))
    assert coordinator.fetch(values) == [1, 1, 1]


def test_no_thread_asks_for_new_workers_after_the_coordinator_is_gone() -> None:
    coordinator = ClusterCoordinator(FakeStrategy())
    (asking,) = coordinator._workers.others
    workers = coordinator._workers
    assert asking.is_alive()
    del coordinator
    gc.collect()
    workers.join(SECONDS)
    assert not asking.is_alive()
    # A worker that is found at the last moment has no thread that nobody ends.
    workers.add(FakeLink(2))
    assert len(workers.threads) == 2


def test_a_per_worker_value_keeps_the_owner_and_not_the_coordinator(
    coordinator: ClusterCoordinator,
) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: [1])
    assert isinstance(dataset, PerWorkerValues)
    assert dataset.owner is coordinator._workers


def test_ctrl_c_ends_join_and_the_closures_go_on(coordinator: ClusterCoordinator) -> None:
    gate = threading.Event()
    value = coordinator.schedule(gate.wait, (30,))
    stop = threading.Event()
    main = threading.get_ident()

    def interrupt() -> None:
        wait_for(lambda: bool(coordinator._queue._targets))
        if not stop.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
    finally:
        stop.set()
        signal.signal(signal.SIGINT, before)
    assert not coordinator.done()
    gate.set()
    coordinator.join()
    assert value.fetch() is True


def test_a_closure_and_its_result_are_freed_as_soon_as_nobody_needs_them(
    coordinator: ClusterCoordinator,
) -> None:
    class Array(np.ndarray):
        pass

    argument = np.zeros(2).view(Array)
    value: Any = coordinator.schedule(lambda x: (x + 1).view(Array), (argument,))
    references = [weakref.ref(argument), weakref.ref(value.fetch())]
    coordinator.join()
    del argument, value
    # Without the garbage collector: the arrays may be large.
    wait_for(lambda: not any(reference() is not None for reference in references))
