"""Names and methods that `tf.distribute` has from version 1."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import DistributedIterator, InputReplicationMode, PerReplica, Variable
from jaxdist.compat import v1
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MissingNameError,
    OutOfRangeError,
    ShapeError,
)
from tests.strategies.oracle import of_this_process, refused
from tests.strategies_under_test import Row


def _two() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _first_rows(strategy: jaxdist.Strategy, batch: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(batch)]


def _summed(x: Any) -> Any:
    return x.sum()


# Datasets and iterators


def test_datasets_from_a_function_have_an_older_name_that_warns(
    strategy: jaxdist.Strategy,
) -> None:
    own = strategy.layout.local_replicas
    with pytest.warns(DeprecationWarning, match="use distribute_datasets_from_function"):
        data = strategy.experimental_distribute_datasets_from_function(
            lambda context: [np.full(1, i) for i in own]
        )
    assert _first_rows(strategy, next(iter(data))) == [[i] for i in own]


def test_a_dataset_and_a_function_give_an_iterator_at_once(strategy: jaxdist.Strategy) -> None:
    own = strategy.layout.local_replicas
    for iterator in (
        strategy.make_dataset_iterator([np.arange(strategy.num_replicas_in_sync)]),
        strategy.make_input_fn_iterator(lambda context: [np.full(1, i) for i in own]),
    ):
        assert type(iterator) is DistributedIterator
        assert iterator.initialize() == []
        assert _first_rows(strategy, iterator.get_next()) == [[i] for i in own]
        with pytest.raises(OutOfRangeError):
            iterator.get_next()


def test_an_input_function_may_return_a_function_of_one_element() -> None:
    strategy = _two()
    elements = iter([np.full(1, i) for i in range(5)])
    iterator = strategy.make_input_fn_iterator(lambda context: lambda: next(elements))
    assert [_first_rows(strategy, batch) for batch in iterator] == [
        [[0], [1]],
        [[2], [3]],
        [[4], []],
    ]


def test_an_input_function_may_return_a_generator_function() -> None:
    def elements() -> Any:
        yield from (np.zeros(1), np.ones(1))

    iterator = _two().make_input_fn_iterator(lambda context: elements)
    assert _first_rows(_two(), iterator.get_next()) == [[0], [1]]


def test_iterators_of_functions_know_one_replication_mode() -> None:
    with pytest.raises(ArgumentError, match=r"PER_REPLICA[^$]*PER_WORKER"):
        _two().make_input_fn_iterator(lambda _: [np.zeros(1)], InputReplicationMode.PER_REPLICA)


def test_an_iterator_of_a_source_that_begins_once_goes_on_when_it_cannot_begin_anew() -> None:
    iterator = _two().make_dataset_iterator(x for x in (np.zeros(2), np.ones(2)))
    iterator.initialize()
    iterator.get_next()
    with pytest.raises(ContextError, match="only once"):
        iterator.initialize()
    assert _first_rows(_two(), iterator.get_next()) == [[1], [1]]


def test_arrays_become_examples_and_examples_batches(strategy: jaxdist.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    x, y = np.arange(4 * count * 3).reshape(-1, 3), np.arange(4 * count)
    for owner in (strategy, strategy.extended):
        examples = owner.experimental_make_numpy_dataset({"x": x, "y": y})
        assert len(examples) == 4 * count
        assert [int(e["y"]) for e in examples] == y.tolist()
        data = strategy.experimental_distribute_dataset(examples.batch(2 * count))
        assert len(data) == 2
        batch = next(iter(data))
        first = strategy.layout.local_replicas[0]
        assert _first_rows(strategy, batch["x"])[0] == x[2 * first : 2 * first + 2].tolist()


def test_single_examples_are_not_split() -> None:
    examples = _two().experimental_make_numpy_dataset(np.zeros((8, 4)))
    with pytest.raises(ArgumentTypeError, match=r"examples\.batch"):
        _two().experimental_distribute_dataset(examples)
    assert len(_two().distribute_datasets_from_function(lambda _: examples)) == 4


@pytest.mark.parametrize("bad", [{"x": np.zeros(16), "y": np.zeros(8)}, 1.0, {}])
def test_arrays_that_are_no_examples_are_named(bad: Any) -> None:
    with pytest.raises(ShapeError, match="experimental_make_numpy_dataset"):
        _two().experimental_make_numpy_dataset(bad)


def test_transformations_of_datasets_are_named_with_their_replacement() -> None:
    examples = _two().experimental_make_numpy_dataset(np.zeros(4))
    assert not hasattr(examples, "shuffle")
    with pytest.raises(MissingNameError, match=r"batch\(size, shuffle=True"):
        examples.shuffle(100)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        examples.nothing  # type: ignore[attr-defined]  # noqa: B018


# Values


def test_unwrap_and_group_give_what_the_replicas_of_this_process_have(strategy_row: Row) -> None:
    strategy, count = strategy_row.make(), strategy_row.num_replicas
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    listed = of_this_process(strategy, range(count))
    assert [float(v) for v in strategy.unwrap(value)] == listed
    grouped = strategy.group(value)
    assert [float(v) for v in (grouped if len(listed) > 1 else [grouped])] == listed
    jax.block_until_ready(grouped)
    assert strategy.group(3) == 3


def test_experimental_run_takes_the_next_batch_of_an_iterator(strategy: jaxdist.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator([np.arange(2.0 * count)])
    total = strategy.experimental_run(lambda x: x.sum(), iterator)
    own = [4 * r + 1 for r in range(count)]
    assert list(map(float, strategy.unwrap(total))) == of_this_process(strategy, own)
    with pytest.raises(OutOfRangeError):
        strategy.experimental_run(lambda x: x.sum(), iterator)
    assert int(strategy.experimental_run(lambda: jnp.int32(7))) == 7
    with pytest.raises(ArgumentTypeError, match="make_dataset_iterator"):
        strategy.experimental_run(lambda x: x, iter([1]))  # type: ignore[arg-type]


# The lower-level view


def test_state_of_no_variable_is_updated_once_on_each_replica(strategy_row: Row) -> None:
    strategy, count = strategy_row.make(), strategy_row.num_replicas
    extended = strategy.extended
    values = strategy.run(
        lambda: jnp.float32(jaxdist.get_replica_context().replica_id_in_sync_group)
    )
    devices = extended.non_slot_devices([])
    result = extended.update_non_slot(devices, lambda x, y: x + y, (values,), {"y": 10.0})
    listed = of_this_process(strategy, range(count))
    assert [float(v) for v in strategy.unwrap(result)] == [10.0 + i for i in listed]
    apart = extended.update_non_slot(devices, lambda x: 2 * x, (values,), group=False)
    assert isinstance(apart, tuple)
    assert [float(v) for v in apart] == [2.0 * i for i in listed]


def test_state_of_no_variable_is_updated_in_a_merge_function() -> None:
    strategy = _two()

    def merged(strategy: Any, x: Any) -> Any:
        devices = strategy.extended.non_slot_devices([])
        return strategy.extended.update_non_slot(devices, lambda x: x + 1, (x,))

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().merge_call(merged, (x,))

    found = strategy.run(step, (PerReplica([1.0, 3.0]),))
    assert [float(v) for v in strategy.unwrap(found)] == [2.0, 4.0]


def test_the_place_of_such_state_is_a_variable_or_all_devices() -> None:
    strategy = _two()
    with strategy.scope():
        v = Variable(1.0)
    assert float(strategy.extended.update_non_slot(v, lambda: jnp.float32(4))) == 4
    with jaxdist.MirroredStrategy(["cpu:2", "cpu:3"]).scope():
        other = Variable(1.0)
    for bad in (other, ["cpu:0"], "cpu:1", None, 3):
        with pytest.raises(ArgumentError, match="non_slot_devices"):
            strategy.extended.update_non_slot(bad, lambda: 4)


def test_several_steps_on_an_iterator_give_outputs_of_the_last_one(
    strategy: jaxdist.Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    iterator = strategy.make_dataset_iterator([np.full(count, i, np.float32) for i in range(4)])
    seen = []

    def fn(context: Any, batch: Any) -> None:
        sums = strategy.run(_summed, (batch,))
        seen.append(float(strategy.reduce("sum", sums, axis=None)))
        context.set_last_step_output("total", sums, "sum")
        context.set_last_step_output("each", sums)
        context.set_non_tensor_output("count", len(seen))

    context = strategy.extended.experimental_run_steps_on_iterator(
        fn, iterator, 3, initial_loop_values={"before": 5}
    )
    assert seen == [0.0, count, 2.0 * count]
    assert float(context.last_step_outputs["total"]) == 2 * count
    each = strategy.unwrap(context.last_step_outputs["each"])
    assert [float(v) for v in each] == [2.0] * len(strategy.layout.local_replicas)
    assert context.last_step_outputs["before"] == 5
    assert context.non_tensor_outputs == {"count": 3}
    assert context.run_op is None
    with pytest.raises(OutOfRangeError):
        strategy.extended.experimental_run_steps_on_iterator(fn, iterator, 2)
    assert len(seen) == 4


def test_outputs_of_several_steps_are_set_across_replicas() -> None:
    strategy = _two()
    iterator = strategy.make_dataset_iterator([np.zeros(2)])

    def fn(context: Any, batch: Any) -> None:
        strategy.run(lambda x: context.set_last_step_output("x", x), (batch,))

    with pytest.raises(ContextError, match="Return the value from the step"):
        strategy.extended.experimental_run_steps_on_iterator(fn, iterator)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"iterator": [1]}, ArgumentTypeError),
        ({"iterations": -1}, ArgumentError),
        ({"iterations": 1.0}, ArgumentTypeError),
        ({"iterations": True}, ArgumentTypeError),
        ({"initial_loop_values": [1]}, ArgumentTypeError),
        ({"fn": 3}, ArgumentTypeError),
    ],
)
def test_wrong_arguments_for_several_steps_are_named_before_a_batch_is_taken(
    given: dict[str, Any], error: type[Exception]
) -> None:
    iterator = _two().make_dataset_iterator([np.zeros(2)])
    usual: dict[str, Any] = {"fn": lambda context, batch: None, "iterator": iterator}
    with pytest.raises(error, match="experimental_run_steps_on_iterator"):
        _two().extended.experimental_run_steps_on_iterator(**{**usual, **given})
    iterator.get_next()


def test_what_a_strategy_says_of_its_hosts_and_its_process(strategy_row: Row) -> None:
    strategy = strategy_row.make()
    extended, is_first = strategy.extended, jax.process_index() == 0
    is_tpu = strategy_row.name.startswith("tpu")
    assert extended.experimental_require_static_shapes is is_tpu
    assert extended.should_checkpoint is is_first
    assert extended.should_save_summary is is_first
    assert extended.experimental_should_init
    assert not extended.experimental_between_graph
    assert extended.num_hosts == jax.process_count()
    assert extended.num_replicas_per_host == len(strategy.layout.local_replicas)


def test_hosts_are_counted_by_the_device_assignment() -> None:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:2x4")
    topology = jaxdist.tpu.experimental.initialize_tpu_system(resolver)
    assignment = jaxdist.tpu.experimental.DeviceAssignment.build(topology, num_replicas=3)
    for strategy, hosts, replicas in (
        (jaxdist.TPUStrategy(resolver), 2, 4),
        (jaxdist.TPUStrategy(resolver, assignment), 1, 3),
        (v1.experimental.TPUStrategy(resolver), 2, 4),
    ):
        facts = (strategy.extended.num_hosts, strategy.extended.num_replicas_per_host)
        assert facts == (hosts, replicas)


# compat.v1


V1_STRATEGIES = {
    "mirrored": lambda: v1.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one_device": lambda: v1.OneDeviceStrategy("cpu:1"),
    "tpu": lambda: v1.experimental.TPUStrategy(
        jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:1x2")
    ),
}


@pytest.mark.parametrize("name", V1_STRATEGIES)
def test_reduce_of_version_1_needs_no_axis(name: str) -> None:
    strategy = V1_STRATEGIES[name]()
    assert isinstance(strategy, (v1.Strategy, jaxdist.Strategy))
    sums = strategy.run(lambda: jaxdist.get_replica_context().all_reduce("sum", 1.0))
    assert float(sums) == strategy.num_replicas_in_sync
    values = strategy.experimental_distribute_values_from_function(lambda _: np.float32(2))
    assert float(strategy.reduce("sum", values)) == 2 * strategy.num_replicas_in_sync
    rows = strategy.experimental_distribute_values_from_function(lambda _: np.ones(3))
    assert float(strategy.reduce("mean", rows, axis=0)) == 1
    with strategy.scope():
        assert jaxdist.get_strategy() is strategy


def test_one_device_of_version_1_gives_plain_values_and_is_copied() -> None:
    import copy

    strategy = v1.OneDeviceStrategy("cpu:1")
    assert strategy.experimental_distribute_values_from_function(lambda _: 7) == 7
    for name, make in V1_STRATEGIES.items():
        other = copy.deepcopy(make())
        assert type(other).__name__ == type(make()).__name__, name
        assert other.num_replicas_in_sync == make().num_replicas_in_sync


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_steps_per_run_is_a_number_of_steps(bad: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="steps_per_run"):
        v1.experimental.TPUStrategy(steps_per_run=bad)


def test_steps_per_run_is_kept() -> None:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("virtual:v5e:1x2")
    strategy = v1.experimental.TPUStrategy(resolver, steps_per_run=4)
    assert strategy.steps_per_run == 4
    assert strategy.cluster_resolver is resolver


def test_losses_are_reduced_by_sum() -> None:
    assert v1.get_loss_reduction() is jaxdist.ReduceOp.SUM


# contrib


def test_the_cross_replica_context_is_the_strategy_in_its_scope_and_in_merge_functions() -> None:
    strategy, contrib = _two(), jaxdist.contrib
    assert contrib.get_cross_replica_context() is None
    with strategy.scope():
        assert contrib.get_cross_replica_context() is strategy
    seen = []

    def merged(strategy: Any) -> None:
        seen.append(contrib.get_cross_replica_context())

    def step() -> None:
        seen.append(contrib.get_cross_replica_context())
        jaxdist.get_replica_context().merge_call(merged)

    strategy.run(step)
    assert seen[:2] == [None, strategy]


def test_a_replica_context_is_required_to_be_that_of_the_caller() -> None:
    strategy, kept = _two(), []

    def step() -> None:
        kept.append(jaxdist.get_replica_context())
        jaxdist.contrib.require_replica_context(kept[-1])

    strategy.run(step)
    with strategy.scope(), pytest.raises(RuntimeError, match="require_replica_context"):
        jaxdist.contrib.require_replica_context(kept[0])


def test_a_monitor_calls_a_step_until_the_data_has_ended() -> None:
    strategy, seen = _two(), []
    iterator = strategy.make_dataset_iterator([np.full(2, i) for i in range(3)])
    monitor = jaxdist.contrib.Monitor(lambda: seen.append(iterator.get_next()))
    monitor.run_steps(2)
    assert len(seen) == 2
    monitor.run_steps()
    assert len(seen) == 3
    with pytest.raises(ValueError, match="session"):
        jaxdist.contrib.Monitor(lambda: None, session=object())
    with pytest.raises(ArgumentTypeError, match="num_steps"):
        monitor.run_steps(1.5)  # type: ignore[arg-type]


def test_older_names_are_the_same_objects() -> None:
    contrib = jaxdist.contrib
    assert contrib.DistributionStrategy is jaxdist.Strategy
    assert contrib.ReductionToOneDeviceCrossDeviceOps is jaxdist.ReductionToOneDevice
    assert contrib.get_distribution_strategy is jaxdist.get_strategy
    implementation = jaxdist.experimental.CommunicationImplementation
    assert jaxdist.experimental.CollectiveCommunication is implementation


def test_an_update_of_a_plain_array_is_no_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = jaxdist.Variable(jnp.ones(2))
    devices = strategy.extended.non_slot_devices([variable])
    updated = strategy.extended.update_non_slot(devices, lambda x: x + 1, (jnp.ones(2),))
    assert updated.tolist() == [2, 2]
    strategy.extended.update(variable, lambda v, x: v.assign_add(x), (np.ones(2, "float32"),))
    assert np.asarray(variable.value()).tolist() == [2, 2]
    assert not caplog.records


@pytest.mark.parametrize("given", [jnp.ones(2), np.ones(2), PerReplica([1.0, 2.0])])
def test_state_is_not_beside_an_array(given: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    with refused(ArgumentError, "update_non_slot", "colocate_with", "non_slot_devices(variables)"):
        strategy.extended.update_non_slot(given, lambda: 1.0)
