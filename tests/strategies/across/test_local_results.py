"""Values of single replicas: taking them apart, and making them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, Strategy
from jaxdist.errors import ArgumentTypeError, ReplicaValueError
from tests.strategies.oracle import of_this_process, per_replica, placed, refused, split


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _id() -> jax.Array:
    return jaxdist.get_replica_context().replica_id_in_sync_group


# experimental_local_results


def test_a_per_replica_value_has_one_entry_for_each_replica(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    held = per_replica(strategy, lambda r: r + 1)
    listed = of_this_process(strategy, range(1, count + 1))
    assert strategy.experimental_local_results(held) == tuple(listed)
    ids = strategy.experimental_local_results(strategy.run(_id))
    assert [int(i) for i in ids] == of_this_process(strategy, range(count))


@pytest.mark.parametrize("value", [3, 2.5, "text", None, np.ones(2)], ids=repr)
def test_a_value_that_is_not_distributed_has_one_entry(strategy: Strategy, value: Any) -> None:
    got = strategy.experimental_local_results(value)
    assert type(got) is tuple
    assert len(got) == 1
    assert got[0] is value


def test_an_array_that_is_not_distributed_has_one_entry(strategy: Strategy) -> None:
    value = jnp.ones(2)
    assert strategy.experimental_local_results(value)[0] is value
    assert len(strategy.experimental_local_results(value)) == 1


@pytest.mark.a_device_for_each
def test_a_mirrored_array_has_an_entry_on_the_device_of_each_replica(strategy: Strategy) -> None:
    value = placed(strategy, np.array([1.0, 2.0], np.float32))
    got = strategy.experimental_local_results(value)
    assert len(got) == len(strategy.layout.local_replicas)
    devices = [v.devices() for v in got]
    assert len(set(map(frozenset, devices))) == len(got)
    for v in got:
        np.testing.assert_array_equal(v, [1, 2])


def test_an_array_in_the_per_replica_layout_has_its_rows_as_entries(two: Strategy) -> None:
    got = two.experimental_local_results(split(two, np.arange(4)))
    assert [v.tolist() for v in got] == [[0, 1], [2, 3]]


def test_structures_have_one_structure_for_each_replica(two: Strategy) -> None:
    x = PerReplica([1, 2])
    local = two.experimental_local_results
    assert local({"a": x, "b": 3}) == ({"a": 1, "b": 3}, {"a": 2, "b": 3})
    assert local([x, "s"]) == ([1, "s"], [2, "s"])
    assert local((x, {"y": (x,)})) == ((1, {"y": (1,)}), (2, {"y": (2,)}))


def test_structures_without_a_distributed_leaf_are_replicated(two: Strategy) -> None:
    local = two.experimental_local_results
    assert local([1, 2]) == ([1, 2], [1, 2])
    assert local([]) == ([], [])
    assert local({}) == ({}, {})
    assert local((1, ("a",))) == ((1, ("a",)), (1, ("a",)))


@pytest.mark.parametrize("make", [jaxdist.get_strategy, lambda: OneDeviceStrategy("cpu:1")])
def test_one_replica_has_one_entry_whatever_the_value(make: Any) -> None:
    strategy = make()
    for value in (1, [1, 2], [], {"a": 1}, None, (1, 2)):
        assert strategy.experimental_local_results(value) == (value,)


def test_results_of_a_step_are_taken_apart_with_their_structure(two: Strategy) -> None:
    got = two.experimental_local_results(two.run(lambda: {"a": _id() + 1, "b": [_id() + 2, 5]}))
    assert jax.tree.map(int, got) == ({"a": 1, "b": [2, 5]}, {"a": 2, "b": [3, 5]})
    constant = two.experimental_local_results(two.run(lambda: jnp.asarray([2, 3])))
    assert [v.tolist() for v in constant] == [[2, 3], [2, 3]]


def test_a_value_of_another_strategy_is_refused(two: Strategy) -> None:
    for theirs in (PerReplica([1, 2, 3]), MirroredStrategy().run(_id)):
        with refused(ReplicaValueError, "2 replicas"):
            two.experimental_local_results({"x": theirs})


def test_empty_parts_have_an_entry_for_each_replica(strategy: Strategy) -> None:
    value = strategy.run(lambda x: x, (per_replica(strategy, lambda r: np.ones((0, 3))),))
    got = strategy.experimental_local_results(value)
    assert [v.shape for v in got] == [(0, 3)] * len(strategy.layout.local_replicas)


# experimental_distribute_values_from_function


def test_value_fn_is_called_once_for_each_replica_in_order(strategy: Strategy) -> None:
    seen = []

    def value_fn(context: jaxdist.experimental.ValueContext) -> int:
        seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return context.replica_id_in_sync_group

    value = strategy.experimental_distribute_values_from_function(value_fn)
    count = strategy.num_replicas_in_sync
    assert seen == of_this_process(strategy, [(r, count) for r in range(count)])
    if isinstance(value, PerReplica):
        assert value.values == tuple(of_this_process(strategy, range(count)))
    else:
        assert value == 0


def test_value_fn_runs_outside_every_strategy(strategy: Strategy) -> None:
    seen = []
    with strategy.scope():
        strategy.experimental_distribute_values_from_function(
            lambda _: seen.append((jaxdist.has_strategy(), jaxdist.in_cross_replica_context()))
        )
    assert set(seen) == {(False, False)}


def test_value_fn_runs_outside_the_ambient_strategy_too(two: Strategy) -> None:
    seen = []
    jaxdist.experimental_set_strategy(two)
    try:
        two.experimental_distribute_values_from_function(
            lambda _: seen.append(jaxdist.has_strategy())
        )
        assert jaxdist.get_strategy() is two
    finally:
        jaxdist.experimental_set_strategy(None)
    assert seen == [False, False]


@pytest.mark.parametrize("value", [7, None, "text"], ids=repr)
def test_equal_values_are_per_replica_all_the_same(two: Strategy, value: Any) -> None:
    got = two.experimental_distribute_values_from_function(lambda _: value)
    assert isinstance(got, PerReplica)
    assert got.values == (value, value)


def test_structures_are_mapped_leaf_by_leaf(two: Strategy) -> None:
    got = two.experimental_distribute_values_from_function(
        lambda c: {"a": c.replica_id_in_sync_group, "b": (np.ones(2), [])}
    )
    assert got["a"].values == (0, 1)
    assert isinstance(got["b"][0], PerReplica)
    assert got["b"][1] == []


def test_one_device_and_the_default_strategy_give_the_raw_value() -> None:
    for strategy in (jaxdist.get_strategy(), OneDeviceStrategy("cpu:2")):
        assert strategy.experimental_distribute_values_from_function(lambda c: [5]) == [5]


def test_a_mirrored_strategy_of_one_device_gives_one_component() -> None:
    strategy = MirroredStrategy(["cpu:0"])
    got = strategy.experimental_distribute_values_from_function(lambda c: 5)
    assert isinstance(got, PerReplica)
    assert got.values == (5,)


def test_what_value_fn_gave_goes_into_a_step_and_is_reduced(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    value = strategy.experimental_distribute_values_from_function(
        lambda c: np.full(2, c.replica_id_in_sync_group, np.float32)
    )
    doubled = strategy.run(lambda x: x * 2, (value,))
    total = strategy.reduce("SUM", doubled, axis=None)
    np.testing.assert_allclose(total, [count * (count - 1)] * 2)


def test_different_structures_are_refused_and_shown(two: Strategy) -> None:
    with refused(ReplicaValueError, "different structures", "Replica 0", "Replica 1"):
        two.experimental_distribute_values_from_function(
            lambda c: [1] if c.replica_id_in_sync_group else (1,)
        )


def test_an_exception_of_value_fn_keeps_its_type_and_leaves_the_context(two: Strategy) -> None:
    with two.scope():
        with pytest.raises(ZeroDivisionError):
            two.experimental_distribute_values_from_function(lambda c: 1 / 0)
        assert jaxdist.get_strategy() is two


def test_what_is_no_function_is_refused(two: Strategy) -> None:
    with refused(ArgumentTypeError, "experimental_distribute_values_from_function", "int"):
        two.experimental_distribute_values_from_function(3)  # type: ignore[arg-type]


def test_a_value_context_says_which_replica_it_is() -> None:
    context = jaxdist.experimental.ValueContext()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    context = jaxdist.experimental.ValueContext(0, 2)
    assert "replica id 0" in str(context)
    assert "total replicas in sync: 2" in str(context)
    with pytest.raises(AttributeError):
        context.num_replicas_in_sync = 3  # type: ignore[misc]
