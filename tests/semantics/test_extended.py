"""Statements of TF_SEMANTICS 2.8 (methods of `StrategyExtended`) that have no other test."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Variable, VariableAggregation, get_replica_context
from jaxdist.errors import ArgumentError
from tests.semantics.oracle import (
    AGGREGATIONS,
    MEAN,
    NONE,
    ON_READ,
    ON_WRITE,
    SUM,
    copies,
    devices_of,
    made,
    strategy_of,
)
from tests.strategies.oracle import is_plain, refused

ONE_AND_THREE = PerReplica([1.0, 3.0])


def _add(v: Variable, x: Any) -> Any:
    return v.assign_add(x)


# reduce_to, batch_reduce_to


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_a_variable_as_destination_stands_for_its_devices(
    two: jaxdist.Strategy, synchronization: Any
) -> None:
    v = made(two, synchronization=synchronization)
    pairs = [(ONE_AND_THREE, v), (ONE_AND_THREE, "cpu:1")]

    total = two.extended.reduce_to("SUM", ONE_AND_THREE, v)
    first, second = two.extended.batch_reduce_to("MEAN", pairs)
    spread = two.extended.broadcast_to(np.float32(5), v)

    for found, expected in [(total, 4.0), (first, 2.0), (spread, 5.0)]:
        assert is_plain(found)
        assert found.sharding.is_equivalent_to(two.replicated_sharding, 0)
        assert float(found) == expected
    assert second.devices() == {jax.devices()[1]}
    assert copies(v) == [10.0, 10.0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_aggregation_is_no_reduce_op(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    op: Any = aggregation

    with refused(ArgumentError, f"VariableAggregation.{aggregation.name}", "a jaxdist.ReduceOp"):
        two.extended.reduce_to(op, ONE_AND_THREE, "cpu:0")
    with refused(ArgumentError, f"VariableAggregation.{aggregation.name}", "a jaxdist.ReduceOp"):
        two.extended.batch_reduce_to(op, [(ONE_AND_THREE, "cpu:0")])


# update


@pytest.mark.both_executors
def test_update_gives_each_copy_its_own_arguments_and_all_copies_the_others(
    two: jaxdist.Strategy,
) -> None:
    v = made(two, synchronization=ON_READ, aggregation=MEAN)

    def change(v: Variable, x: Any, factor: Any, *, y: Any, name: str) -> Any:
        assert name == "all"
        return v.assign(v * factor + x + y)

    found = two.extended.update(
        v,
        change,
        (ONE_AND_THREE, 2.0),
        {"y": PerReplica([100.0, 200.0]), "name": "all"},
        group=False,
    )

    assert [float(x) for x in found] == copies(v) == [121.0, 223.0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_of_a_mirrored_variable_is_no_aggregation_and_grouped_it_is_mirrored(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    v = made(two, aggregation=aggregation)

    grouped = two.extended.update(v, _add, (2.0,))
    apart = two.extended.update(v, _add, (2.0,), group=False)

    assert is_plain(grouped)
    assert grouped.sharding.is_equivalent_to(two.replicated_sharding, 0)
    assert float(grouped) == 12.0
    assert type(apart) is tuple
    assert [float(x) for x in apart] == copies(v) == [14.0, 14.0]
    assert devices_of(apart) == [{d} for d in jax.devices()[:2]]


def test_grouped_results_of_update_are_those_that_a_step_would_give(two: jaxdist.Strategy) -> None:
    v = made(two)

    own, text, nothing = two.extended.update(v, lambda v, x: (v + x, "s", None), (ONE_AND_THREE,))

    assert [float(x) for x in own.values] == [11.0, 13.0]
    assert (text, nothing) == ("s", None)


@pytest.mark.both_executors
def test_update_in_a_replica_changes_the_copy_of_that_replica(two: jaxdist.Strategy) -> None:
    own = made(two, synchronization=ON_READ, aggregation=SUM)
    mirrored = made(two, aggregation=SUM)

    def step(x: Any) -> Any:
        update = jaxdist.get_strategy().extended.update
        return update(own, _add, (x,)), update(mirrored, _add, (2.0,))

    of_own, of_mirrored = two.run(step, (ONE_AND_THREE,))

    assert [float(x) for x in of_own.values] == copies(own) == [11.0, 13.0]
    assert copies(mirrored) == [12.0, 12.0]
    assert float(of_mirrored) == 12.0


def test_update_in_a_replica_gives_the_results_of_all_replicas_one_by_one(
    two: jaxdist.Strategy,
) -> None:
    own = made(two, synchronization=ON_READ, aggregation=SUM)

    def step(x: Any) -> Any:
        found = two.extended.update(own, _add, (x,), group=False)
        assert len(found) == 2
        return found

    first, second = two.run(step, (ONE_AND_THREE,))
    assert (float(first), float(second)) == (11.0, 13.0)


# Variables


@pytest.mark.parametrize("value", [3, "text", None, np.ones(2), ONE_AND_THREE], ids=repr)
def test_a_value_of_no_variable_is_its_own_container(two: jaxdist.Strategy, value: Any) -> None:
    assert two.extended.value_container(value) is value


def test_the_container_of_what_update_is_given_is_the_variable(two: jaxdist.Strategy) -> None:
    v, seen = made(two), []

    two.extended.update(v, lambda given: seen.append(two.extended.value_container(given)))

    assert seen
    assert all(found is v for found in seen)


def test_a_variable_made_beside_another_lies_on_its_devices(two: jaxdist.Strategy) -> None:
    v = made(two)

    with two.scope(), two.extended.colocate_vars_with(v):
        momentum = Variable([0.0, 0.0])

    assert devices_of(momentum.values) == devices_of(v.values) == [{d} for d in jax.devices()[:2]]


def test_variables_are_not_made_beside_one_of_another_strategy(two: jaxdist.Strategy) -> None:
    theirs = made(strategy_of(3))

    with (
        two.scope(),
        refused(ArgumentError, "made in the scope"),
        two.extended.colocate_vars_with(theirs),
    ):
        pass


def test_read_var_reads_across_replicas(two: jaxdist.Strategy) -> None:
    total = made(two, synchronization=ON_READ, aggregation=SUM)
    without = made(two, synchronization=ON_READ, aggregation=NONE)
    total.assign(ONE_AND_THREE)

    assert is_plain(two.extended.read_var(total))
    assert float(two.extended.read_var(total)) == 4.0
    with refused(ArgumentError, "'w'", "NONE"):
        two.extended.read_var(without)


@pytest.mark.both_executors
def test_call_for_each_replica_gives_what_run_gives(two: jaxdist.Strategy) -> None:
    def step(x: Any, *, y: Any) -> Any:
        return x + y, get_replica_context().all_reduce("SUM", x), "text"

    own, total, text = two.extended.call_for_each_replica(step, (ONE_AND_THREE,), {"y": 10.0})

    assert [float(x) for x in own.values] == [11.0, 13.0]
    assert (float(total), text) == (4.0, "text")
