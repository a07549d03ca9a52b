"""TF_SEMANTICS §2.12, §3.21 and §3.24: the strategy and its coordinator, in one process."""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import (
    ClusterCoordinator,
    PerWorkerValue,
    PerWorkerValues,
    RemoteValue,
    ShardedVariable,
)
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CancelledError,
    ClosureInputError,
    ClusterError,
    ContextError,
    InputContextError,
    OutOfRangeError,
    PSUnavailableError,
    UnsupportedError,
)
from jaxdist.experimental.partitioners import FixedShardsPartitioner
from tests.parameter_server.strategy.making import make_resolver, make_strategy

Coordinated = tuple[Any, ClusterCoordinator]
_ROWS = np.arange(8.0, dtype="float32")


@pytest.fixture
def coordinated() -> Coordinated:
    """Return a strategy of two servers and two workers, and its coordinator."""
    strategy = make_strategy()
    return strategy, ClusterCoordinator(strategy)


# The constructor


def _make_from(jobs: dict[str, list[str]], **more: Any) -> jaxdist.ParameterServerStrategy:
    resolver = SimpleClusterResolver(ClusterSpec(jobs), rpc_layer="local", **more)
    return jaxdist.ParameterServerStrategy(resolver)


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ({}, "without tasks"),
        # Each cluster has the faults that are looked for later, too.
        ({"trainer": ["a:1"], "chief": ["b:1", "b:2"]}, "the job 'trainer'"),
        ({"chief": ["b:1", "b:2"]}, "2 tasks of the job 'chief'"),
        (
            {"chief": ["b:1"]},
            "(?s)without parameter servers.*needs tasks of both jobs: 'ps' and 'worker'",
        ),
        ({"ps": [], "worker": ["a:1"]}, "without parameter servers"),
        ({"ps": ["b:1"]}, "(?s)without workers.*needs tasks of both jobs"),
    ],
)
def test_a_cluster_is_checked_in_the_order_of_tensorflow(jobs: Any, said: str) -> None:
    with pytest.raises(ClusterError, match=said) as caught:
        _make_from(jobs)
    assert isinstance(caught.value, ValueError)


def test_a_layer_that_is_none_is_refused() -> None:
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]}), rpc_layer="bogus"
    )
    with pytest.raises(ClusterError, match="rpc_layer='bogus'"):
        jaxdist.ParameterServerStrategy(resolver)


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_only_the_chief_makes_the_strategy(job: str) -> None:
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}
    with pytest.raises(ClusterError, match=f"a process that is {job} 0") as caught:
        _make_from(jobs, task_type=job, task_id=0)
    assert f"jaxdist server --type {job} --index 0" in str(caught.value)


def test_a_task_type_that_is_none_of_the_cluster_is_an_error() -> None:
    jobs = {"worker": ["a:1"], "ps": ["b:1"]}
    with pytest.raises(ClusterError, match="task_type='trainer'"):
        _make_from(jobs, task_type="trainer", task_id=0)
    with pytest.raises(ArgumentTypeError, match="was given cluster_resolver='host:1'"):
        jaxdist.ParameterServerStrategy("host:1")


def test_a_strategy_without_a_resolver_is_an_error_that_shows_both_ways_to_one() -> None:
    for given in ((), (None,)):
        with pytest.raises(ArgumentTypeError, match="was given no cluster_resolver") as caught:
            jaxdist.experimental.ParameterServerStrategy(*given)
        assert "TFConfigClusterResolver()" in str(caught.value)
        assert "rpc_layer='local'" in str(caught.value)


def test_facts_of_the_strategy(coordinated: Coordinated) -> None:
    strategy, _ = coordinated
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    assert strategy.extended.parameter_devices == ("/job:chief/replica:0/task:0/device:CPU:0",)
    resolver = make_resolver()
    assert jaxdist.ParameterServerStrategy(resolver).cluster_resolver is resolver
    with pytest.raises(ContextError, match=r"copy\.copy"):
        copy.copy(strategy)
    with pytest.raises(ContextError, match="share them"):
        copy.deepcopy(strategy)


# Variables


def test_variables_are_placed_in_turn_also_in_nested_scopes_and_device_scopes() -> None:
    strategy = make_strategy(servers=3)
    made = []
    with strategy.scope():
        made += [jaxdist.Variable(0.0) for _ in range(2)]
        with jax.default_device(jax.devices("cpu")[1]), strategy.scope():
            made += [jaxdist.Variable(0.0) for _ in range(3)]
    with jax.default_device(jax.devices("cpu")[2]), strategy.scope():
        made.append(jaxdist.Variable(0.0))
    places = [strategy.storage.find_server(v.remote_name) for v in made]
    assert places == [0, 1, 2, 0, 1, 2]


def test_a_partitioner_cuts_variables_and_placement_goes_on_in_turn() -> None:
    strategy = make_strategy(servers=3, variable_partitioner=FixedShardsPartitioner(4))
    rows = np.arange(10.0, dtype="float32")
    with strategy.scope():
        first = jaxdist.Variable(0.0, name="scalar")
        v = jaxdist.Variable(lambda: rows, name="v", trainable=False)
        small = jaxdist.Variable(np.ones((2, 3)), name="small")
        beside = jaxdist.Variable(np.ones((1, 4)), name="one")
    assert isinstance(v, ShardedVariable)
    assert [s.remote_name for s in v.variables] == [f"v/part_{n}" for n in range(4)]
    assert [s.numpy().tolist() for s in v.variables] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert not v.trainable
    assert [s.shape for s in small.variables] == [(1, 3), (1, 3)]
    assert not isinstance(first, ShardedVariable)
    assert not isinstance(beside, ShardedVariable)
    names = [first, *v.variables, *small.variables, beside]
    places = [strategy.storage.find_server(s.remote_name) for s in names]
    assert places == [0, 1, 2, 0, 1, 2, 0, 1]


def test_an_initialiser_that_knows_of_shards_is_called_for_each() -> None:
    strategy = make_strategy(variable_partitioner=FixedShardsPartitioner(2))
    asked = []

    def make(partition_shape: Any, partition_offset: Any) -> Any:
        asked.append((tuple(partition_shape), tuple(partition_offset)))
        return np.full(partition_shape, partition_offset[0], "float32")

    with strategy.scope():
        v = jaxdist.Variable(make, shape=(5, 2), dtype="float32")
    assert asked == [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    np.testing.assert_array_equal(v.numpy()[:, 0], [0, 0, 0, 3, 3])


@pytest.mark.parametrize("bad", [[2, 1, 1], [1, 2], [0, 1], [2]])
def test_a_partitioner_that_cuts_another_dim_is_an_error(bad: list[int]) -> None:
    strategy = make_strategy(variable_partitioner=lambda shape, dtype: bad)
    with pytest.raises(ArgumentError, match="variable_partitioner"), strategy.scope():
        jaxdist.Variable(np.ones((4, 2)))


def test_on_read_is_treated_as_a_variable_that_aggregates(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(
            2.0,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )

    def step() -> Any:
        return strategy.run(lambda: v.assign_add(1.0))

    assert coordinator.schedule(step).fetch() == 3
    assert v.numpy() == 3
    assert not isinstance(v.value(), jaxdist.PerReplica)


# Without a coordinator


def test_run_reduce_and_gather_work_here_with_one_warning(
    coordinated: Coordinated, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(1.0)

    def step(x: Any) -> Any:
        v.assign_add(1.0)
        return x * v.value()

    def scheduled(x: Any) -> Any:
        result = strategy.run(step, (x,))
        return strategy.reduce("sum", result, axis=None), strategy.gather(result[None], axis=0)

    with caplog.at_level(logging.WARNING, "jaxdist"):
        total, rows = coordinator.schedule(scheduled, (np.float32(3),)).fetch()
        assert (total, rows.tolist()) == (6, [6])
        assert not caplog.records
        assert float(strategy.run(step, (np.float32(3),))) == 9
        assert float(strategy.run(step, (np.float32(3),))) == 12
        assert float(strategy.reduce("sum", np.float32(3), axis=None)) == 3
        assert strategy.gather(np.ones(2), axis=0).tolist() == [1, 1]
        said = [r for r in caplog.records if "not on a worker" in r.message]
    assert len(said) == 1


# Datasets


def _distribute(strategy: Any) -> dict[str, Any]:
    return {
        "dataset": strategy.experimental_distribute_dataset(jaxdist.data.batches(_ROWS, 4)),
        "function": strategy.distribute_datasets_from_function(
            lambda context: jaxdist.data.batches(_ROWS, context.get_per_replica_batch_size(4))
        ),
    }


@pytest.mark.parametrize("how", ["dataset", "function"])
def test_only_workers_read_a_distributed_dataset(coordinated: Coordinated, how: str) -> None:
    strategy, _ = coordinated
    with pytest.raises(InputContextError, match="create_per_worker_dataset") as caught:
        next(iter(_distribute(strategy)[how]))
    assert isinstance(caught.value, ValueError)
    # Passed as it is, or made on the worker.
    assert _read_all(_distribute(strategy)[how]) == [6, 22]
    assert _read_all(lambda: _distribute(strategy)[how]) == [6, 22]


def _read_all(dataset: Any) -> list[float]:
    coordinator = ClusterCoordinator(make_strategy(workers=1))
    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def read(iterator: Any) -> Any:
        return jnp.sum(next(iterator))

    found = [coordinator.schedule(read, (iterator,)).fetch() for _ in range(2)]
    with pytest.raises(OutOfRangeError):
        coordinator.schedule(read, (iterator,)).fetch()
    with pytest.raises(OutOfRangeError):
        coordinator.join()
    return [float(x) for x in found]


def _generate() -> Iterator[np.ndarray]:
    yield _ROWS[:4]
    yield _ROWS[4:]


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: [_ROWS[:4], _ROWS[4:]],
        [_ROWS[:4], _ROWS[4:]],
        lambda: [_ROWS[:4].tolist(), _ROWS[4:].tolist()],
        _generate,
        lambda: jaxdist.data.batches(_ROWS, 4),
        lambda: grain.MapDataset.source(list(_ROWS)).batch(4),
        lambda: grain.MapDataset.source(list(_ROWS)).batch(4).to_iter_dataset(),
    ],
    ids=["list", "list itself", "numbers", "generator", "batches", "grain map", "grain iter"],
)
def test_every_kind_of_dataset_is_read(dataset: Any) -> None:
    def add_up(batch: Any) -> Any:
        return jnp.sum(jnp.stack(jax.tree.leaves(batch)))

    coordinator = ClusterCoordinator(make_strategy(workers=1))
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    found = [
        coordinator.schedule(lambda it: add_up(next(it)), (iterator,)).fetch() for _ in range(2)
    ]
    assert [float(x) for x in found] == [6, 22]


def test_a_function_of_the_context_gets_one_pipeline_and_the_replicas() -> None:
    strategy = make_strategy()
    seen = []

    def dataset() -> Any:
        def make(context: jaxdist.InputContext) -> Any:
            seen.append(
                (
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                )
            )
            return [_ROWS]

        return strategy.distribute_datasets_from_function(make)

    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    coordinator.schedule(lambda it: next(it).sum(), (iterator,)).fetch()
    assert set(seen) == {(1, 0, 1)}


def test_iterators_of_one_dataset_begin_anew_and_datasets_are_independent(
    coordinated: Coordinated,
) -> None:
    coordinator = ClusterCoordinator(make_strategy(workers=1))
    one = coordinator.create_per_worker_dataset(lambda: [np.float32(1), np.float32(2)])
    other = coordinator.create_per_worker_dataset(lambda: [np.float32(10), np.float32(20)])

    def add(a: Any, b: Any) -> Any:
        return next(a) + next(b)

    for _ in range(2):
        given = iter(one), iter(other)
        assert [coordinator.schedule(add, given).fetch() for _ in range(2)] == [11, 22]
    assert isinstance(one, PerWorkerValues)
    assert isinstance(iter(one), PerWorkerValue)
    with pytest.raises(UnsupportedError, match="on the workers"):
        next(iter(one))


def _raise_value_error() -> Any:
    raise ValueError("no such file")


def _make_variable(strategy: Any) -> Callable[[], Any]:
    def make() -> Any:
        with strategy.scope():
            jaxdist.Variable(1.0)
        return [_ROWS]

    return make


@pytest.mark.parametrize("case", ["raises", "no dataset", "empty", "variable", "strings"])
def test_a_dataset_function_that_fails_is_the_error_of_functions_that_use_it(
    coordinated: Coordinated, case: str
) -> None:
    strategy, coordinator = coordinated
    dataset_fn, said = {
        "raises": (_raise_value_error, "no such file"),
        "no dataset": (lambda: 3, "not iterable"),
        "empty": (list, "no element"),
        "variable": (_make_variable(strategy), "made in a function that was given to"),
        "strings": (lambda: [["a", "b"]], "an element that contains 'a'"),
    }[case]
    broken = iter(coordinator.create_per_worker_dataset(dataset_fn))
    # It is harmless as long as nobody uses it.
    assert coordinator.schedule(lambda: 1).fetch() == 1
    coordinator.join()
    with pytest.raises(ClosureInputError, match=said):
        coordinator.schedule(lambda it: next(it), (broken,))
    coordinator.join()


def test_a_dataset_that_fails_later_is_named_with_its_worker_and_cause(
    coordinated: Coordinated,
) -> None:
    _, coordinator = coordinated

    def make_batches() -> Iterator[np.ndarray]:
        yield np.ones(2, "float32")
        raise OSError("disk gone")

    def take(iterator: Any) -> Any:
        return next(iterator)

    iterator = iter(coordinator.create_per_worker_dataset(make_batches))

    def take_three() -> None:
        for _ in range(3):
            coordinator.schedule(take, (iterator,))
        coordinator.join()

    said = (
        r"Worker [01] could not read a batch of make_batches\(\): OSError: disk gone \(.*:\d+, in"
    )
    with pytest.raises(ClosureInputError, match=said) as caught:
        take_three()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.original_exception is caught.value.__cause__
    # The generator seems to have ended now, which is not what happened.
    with pytest.raises(ClosureInputError, match=said):
        take_three()


def test_a_dataset_that_fails_once_goes_on_with_its_next_batch(coordinated: Coordinated) -> None:
    _, coordinator = coordinated

    class Batches:
        """Raises once in four times."""

        def __init__(self) -> None:
            self.calls = 0

        def __iter__(self) -> Iterator[np.float32]:
            return self

        def __next__(self) -> np.float32:
            self.calls += 1
            if self.calls % 4 == 0:
                raise OSError("network gone")
            return np.float32(self.calls)

    def take_two(iterator: Any) -> Any:
        return jnp.stack([next(iterator), next(iterator)])

    iterator = iter(coordinator.create_per_worker_dataset(Batches))
    found: list[list[float]] = []
    for _ in range(20):
        try:
            found.append(coordinator.schedule(take_two, (iterator,)).fetch().tolist())
            coordinator.join()
        except ClosureInputError:
            with pytest.raises(ClosureInputError):
                coordinator.join()
    # A batch that was read before the error is not lost.
    assert {(1.0, 2.0), (3.0, 5.0)} <= set(map(tuple, found))


def test_a_function_runs_again_if_its_dataset_waits_for_a_server() -> None:
    coordinator = ClusterCoordinator(make_strategy(workers=1))

    class Batches:
        """Raises when the third batch is asked for first."""

        def __init__(self) -> None:
            self.calls = 0

        def __iter__(self) -> Iterator[np.float32]:
            return self

        def __next__(self) -> np.float32:
            self.calls += 1
            if self.calls == 3:
                raise PSUnavailableError("ps 0 does not answer", [0])
            return np.float32(self.calls)

    iterator = iter(coordinator.create_per_worker_dataset(Batches))
    result = coordinator.schedule(lambda it: jnp.stack([next(it), next(it), next(it)]), (iterator,))
    assert result.fetch().tolist() == [1, 2, 4]
    assert coordinator.statistics().retried == 1


def test_a_function_that_runs_again_gets_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy(workers=1)
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.float32(n) for n in (5, 6)]))
    [link] = strategy.links()
    worker = link._worker  # type: ignore[attr-defined]
    run, calls = worker.run, []

    def fail_once(request: Any) -> Any:
        calls.append(request)
        if len(calls) == 1:
            raise PSUnavailableError("ps 0 does not answer", [0])
        return run(request)

    monkeypatch.setattr(worker, "run", fail_once)
    found = [coordinator.schedule(lambda it: next(it), (iterator,)) for _ in range(2)]
    coordinator.join()
    assert [float(one.fetch()) for one in found] == [5, 6]
    assert len(calls) == 3


def test_what_is_no_dataset_is_refused_at_once(coordinated: Coordinated) -> None:
    with pytest.raises(
        ArgumentError, match=r"create_per_worker_dataset was given dataset_fn=3"
    ) as caught:
        coordinated[1].create_per_worker_dataset(3)
    assert isinstance(caught.value, ValueError)


# The coordinator


def test_a_strategy_has_one_coordinator(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    with pytest.raises(ArgumentError, match="parameter server strategy") as caught:
        ClusterCoordinator(jaxdist.OneDeviceStrategy("cpu:0"))  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)


def test_functions_run_later_and_join_and_done_tell_when(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(0.0)
    gate = threading.Event()

    def dataset() -> Iterator[np.ndarray]:
        gate.wait(60)
        yield from [np.ones((), "float32")] * 20

    def step(iterator: Any) -> None:
        v.assign_add(next(iterator))

    def trace_once(iterator: Any) -> None:
        traced.append(1)
        step(iterator)

    traced: list[int] = []
    per_worker = coordinator.create_per_worker_dataset(dataset)
    started = threading.Thread(target=gate.set)
    started.start()
    iterator = iter(per_worker)
    for _ in range(10):
        coordinator.schedule(trace_once, (iterator,))
    coordinator.join()
    started.join()
    assert coordinator.done()
    assert float(v) == 10
    for _ in range(10):
        coordinator.schedule(trace_once, (iterator,))
    coordinator.join()
    assert float(v) == 20
    assert traced == [1]


def test_fetch_takes_structures_and_leaves_other_values(coordinated: Coordinated) -> None:
    _, coordinator = coordinated
    value = coordinator.schedule(lambda: jnp.float32(4))
    assert isinstance(value, RemoteValue)
    assert coordinator.fetch({"a": 3, "b": value, "c": [value, "x", None]}) == {
        "a": 3,
        "b": 4,
        "c": [4, "x", None],
    }
    assert isinstance(value.get(), jax.Array)
    assert type(value.fetch()) is np.ndarray
    other = ClusterCoordinator(make_strategy())
    with pytest.raises(ArgumentError, match="another coordinator"):
        other.fetch(value)


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: ({"x": [v]},)])
def test_a_result_is_no_argument(coordinated: Coordinated, wrap: Any) -> None:
    _, coordinator = coordinated
    value = coordinator.schedule(lambda: 1)
    with pytest.raises(ArgumentError, match="RemoteValue") as caught:
        coordinator.schedule(lambda x: x, wrap(value))
    assert isinstance(caught.value, ValueError)


def test_what_is_no_function_or_no_argument_is_refused(coordinated: Coordinated) -> None:
    _, coordinator = coordinated
    with pytest.raises(ArgumentTypeError, match="Pass the function itself"):
        coordinator.schedule(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="it is a set"):
        coordinator.schedule(lambda x: x, ({1, 2},))
    with pytest.raises(ContextError, match="runs on a worker"):
        coordinator.schedule(lambda: coordinator.schedule(lambda: 1))


def test_an_error_of_a_function_cancels_the_others_once(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(0)

    def add(iterator: Any) -> None:
        v.assign_add(next(iterator))

    short = iter(coordinator.create_per_worker_dataset(lambda: [np.int32(1)]))
    results = [coordinator.schedule(lambda it: add(it), (short,))]
    with pytest.raises(OutOfRangeError):  # noqa: PT012
        for _ in range(1000):
            results.append(coordinator.schedule(add, (short,)))
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    kinds = {"ran": 0, "failed": 0, "cancelled": 0}
    for result in results:
        try:
            assert result.fetch() is None
            kinds["ran"] += 1
        except OutOfRangeError:
            kinds["failed"] += 1
        except CancelledError:
            kinds["cancelled"] += 1
    statistics = coordinator.statistics()
    # A function that schedule raised for has no result here, and counts as cancelled.
    assert int(v) == kinds["ran"] == statistics.applied
    assert kinds["failed"] >= 1
    assert statistics.scheduled == statistics.applied + statistics.failed + statistics.cancelled
    # Everything works again.
    fresh = iter(coordinator.create_per_worker_dataset(lambda: [np.int32(1)] * 5))
    assert coordinator.schedule(add, (fresh,)).fetch() is None


def test_an_error_while_a_function_is_traced_is_raised_by_schedule(
    coordinated: Coordinated,
) -> None:
    _, coordinator = coordinated
    with pytest.raises(TypeError, match="contracting"):
        coordinator.schedule(lambda x: x @ jnp.ones((3, 3)), (np.ones(2),))
    coordinator.join()
    assert coordinator.statistics().scheduled == 0


def test_a_function_that_assigns_by_extended_update_works(coordinated: Coordinated) -> None:
    strategy, coordinator = coordinated
    with strategy.scope():
        v = jaxdist.Variable(1.0)

    def step() -> Any:
        return strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(1.0,))

    assert coordinator.schedule(step).fetch() == 2
    assert float(strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(1.0,))) == 3


# What a coordinator does not take


def test_an_iterator_of_another_coordinator_is_refused(coordinated: Coordinated) -> None:
    other = ClusterCoordinator(make_strategy(workers=1))
    iterator = iter(other.create_per_worker_dataset(lambda: [np.ones(3, np.float32)]))
    with pytest.raises(ArgumentError, match="which another coordinator has made"):
        coordinated[1].schedule(lambda it: next(it).sum(), (iterator,))
    assert float(other.schedule(lambda it: next(it).sum(), (iterator,)).fetch()) == 3


def test_schedule_in_a_traced_function_is_refused(coordinated: Coordinated) -> None:
    _, coordinator = coordinated
    with pytest.raises(ContextError, match=r"ClusterCoordinator\.schedule was called while a func"):
        jax.jit(lambda x: coordinator.schedule(lambda y: y, (x,)))(1.0)


def test_per_worker_values_are_made_by_a_coordinator(coordinated: Coordinated) -> None:
    with pytest.raises(UnsupportedError, match="create_per_worker_dataset") as caught:
        jaxdist.coordinator.PerWorkerValue((1, 2))  # type: ignore[arg-type]
    assert "experimental_get_current_worker_index" in str(caught.value)
    # What the error advises.
    values = [np.float32(3), np.float32(4)]
    _, coordinator = coordinated
    index = jaxdist.coordinator.experimental_get_current_worker_index
    own = coordinator.create_per_worker_dataset(lambda: values[int(index())])
    found = [coordinator.schedule(lambda v: v * 2, (own,)).fetch() for _ in range(8)]
    assert {float(x) for x in found} <= {6.0, 8.0}
