"""Statements of TF_SEMANTICS 2.7 (variables, checkpoints, random numbers) without another test."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import (
    IndexedSlices,
    PerReplica,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
)
from jaxdist.errors import ArgumentError, StateDivergenceError
from jaxdist.training import Checkpoints
from tests.semantics.oracle import (
    AGGREGATIONS,
    FIRST,
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
from tests.strategies.oracle import is_plain, placed, refused

ONE_AND_THREE = PerReplica([1.0, 3.0])
CALLS = ["assign", "assign_add", "assign_sub"]
# What a variable that starts at 10 has after each call with 2.
AFTER_TWO = {"assign": 2.0, "assign_add": 12.0, "assign_sub": 8.0}


# Making


def test_auto_is_on_write_under_a_strategy(two: jaxdist.Strategy) -> None:
    assert made(two).synchronization is ON_WRITE


def test_local_results_of_a_mirrored_variable_are_its_copies(two: jaxdist.Strategy) -> None:
    v = made(two, [1.0, 2.0])

    found = two.experimental_local_results(v)

    assert [x.tolist() for x in found] == [[1.0, 2.0], [1.0, 2.0]]
    assert devices_of(found) == [{d} for d in jax.devices()[:2]]


def _subtract_one(v: Variable) -> None:
    v.assign_sub(1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("make", [jaxdist.get_strategy, lambda: jaxdist.OneDeviceStrategy("cpu:1")])
@pytest.mark.both_executors
def test_a_variable_of_one_device_is_plain_in_every_mode(
    make: Callable[[], jaxdist.Strategy], aggregation: VariableAggregation
) -> None:
    strategy = make()
    v = made(strategy, aggregation=aggregation, synchronization=ON_READ)

    assert not v.trainable
    assert float(v) == 10.0
    assert float(v.assign_add(2.0)) == 12.0
    strategy.run(_subtract_one, (v,))
    assert (copies(v), float(v)) == ([11.0], 11.0)


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
def test_a_deep_copy_lies_where_the_variable_lies_and_changes_by_itself(
    two: jaxdist.Strategy, synchronization: VariableSynchronization
) -> None:
    v = made(two, aggregation=MEAN, synchronization=synchronization)

    other = copy.deepcopy(v)
    two.run(lambda x: other.assign_add(x), (ONE_AND_THREE,))

    assert type(other) is Variable
    assert (other.synchronization, other.aggregation) == (synchronization, MEAN)
    assert devices_of(other.values) == devices_of(v.values)
    assert (copies(v), float(other)) == ([10.0, 10.0], 12.0)


# ON_WRITE


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_across_replicas_an_assignment_returns_a_mirrored_value(
    two: jaxdist.Strategy, aggregation: VariableAggregation, in_scope: bool, call: str
) -> None:
    v = made(two, aggregation=aggregation)

    if in_scope:
        with two.scope():
            result = getattr(v, call)(2.0)
    else:
        result = getattr(v, call)(2.0)

    assert is_plain(result)
    assert result.sharding.is_equivalent_to(two.replicated_sharding, 0)
    assert [float(x) for x in two.experimental_local_results(result)] == [AFTER_TWO[call]] * 2
    assert copies(v) == [AFTER_TWO[call]] * 2


GIVEN: dict[str, Callable[[jaxdist.Strategy], Any]] = {
    "literal": lambda _: 2.0,
    "numpy": lambda _: np.float32(2),
    "array": lambda _: jnp.float32(2),
    "mirrored": lambda strategy: placed(strategy, np.float32(2)),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
@pytest.mark.both_executors
def test_one_value_that_all_replicas_have_is_assigned_as_it_is(
    two: jaxdist.Strategy, aggregation: VariableAggregation, given: str
) -> None:
    value = GIVEN[given](two)
    variables = {call: made(two, aggregation=aggregation) for call in CALLS}

    def step() -> None:
        for call, v in variables.items():
            getattr(v, call)(value)

    two.run(step)

    assert {c: copies(v) for c, v in variables.items()} == {
        c: [x] * 2 for c, x in AFTER_TWO.items()
    }


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", ["literal", "numpy"])
@pytest.mark.both_executors
def test_a_constant_cannot_be_summed(two: jaxdist.Strategy, given: str, call: str) -> None:
    v, value = made(two, aggregation=SUM), GIVEN[given](two)

    with refused(ArgumentError, f"'w'.{call}", "VariableAggregation.SUM"):
        two.run(lambda: getattr(v, call)(value))
    assert copies(v) == [10.0, 10.0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.both_executors
def test_an_array_on_one_device_from_a_closure_cannot_be_summed(
    two: jaxdist.Strategy, call: str
) -> None:
    v, value = made(two, aggregation=SUM), jnp.float32(2)

    with pytest.raises(ValueError, match="'w'"):
        two.run(lambda: getattr(v, call)(value))


@pytest.mark.both_executors
def test_a_mirrored_value_is_summed_over_the_replicas_that_have_it(two: jaxdist.Strategy) -> None:
    v = made(two, aggregation=SUM)

    two.run(lambda x: v.assign(x), (placed(two, np.float32(2)),))

    assert copies(v) == [4.0, 4.0]


@pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])
@pytest.mark.both_executors
def test_without_reading_an_assignment_in_a_replica_returns_nothing(
    two: jaxdist.Strategy, synchronization: VariableSynchronization
) -> None:
    v = made(two, synchronization=synchronization)
    results = [two.run(lambda c=c: getattr(v, c)(2.0, read_value=False)) for c in CALLS[:2]]

    assert results == [None, None]
    assert copies(v) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(SUM, [4.0, 14.0, 6.0]), (MEAN, [2.0, 12.0, 8.0]), (FIRST, [1.0, 11.0, 9.0])],
)
@pytest.mark.both_executors
def test_a_per_replica_value_from_a_closure_is_combined_as_one_that_is_passed(
    two: jaxdist.Strategy, aggregation: VariableAggregation, expected: list[float]
) -> None:
    variables = [made(two, aggregation=aggregation) for _ in CALLS]

    def step() -> list[Any]:
        return [getattr(v, c)(ONE_AND_THREE) for c, v in zip(CALLS, variables, strict=True)]

    results = two.run(step)

    assert [copies(v) for v in variables] == [[x, x] for x in expected]
    assert [float(r) for r in results] == expected


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.both_executors
def test_a_per_replica_value_from_a_closure_is_refused_without_aggregation(
    two: jaxdist.Strategy, call: str
) -> None:
    v = made(two)

    with refused(StateDivergenceError, "2 replicas: w"):
        two.run(lambda: getattr(v, call)(ONE_AND_THREE))
    assert copies(v) == [10.0, 10.0]


@pytest.mark.both_executors
def test_the_update_of_an_optimizer_needs_no_aggregation(two: jaxdist.Strategy) -> None:
    w = made(two, [1.0, 2.0])

    def step(g: Any) -> None:
        w.assign_sub(0.1 * get_replica_context().all_reduce("sum", g))

    two.run(step, (PerReplica([np.array([1.0, 1.0]), np.array([2.0, 3.0])]),))

    np.testing.assert_allclose(copies(w), [[0.7, 1.6]] * 2, rtol=1e-6)


# ON_READ


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.both_executors
def test_in_a_replica_an_on_read_variable_takes_every_kind_of_value_for_itself(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    array = jnp.float32(2)
    own = [made(two, aggregation=aggregation, synchronization=ON_READ) for _ in range(9)]

    def step(x: Any) -> None:
        for number, call in enumerate(CALLS):
            getattr(own[3 * number], call)(2.0)
            getattr(own[3 * number + 1], call)(array)
            getattr(own[3 * number + 2], call)(x)

    two.run(step, (ONE_AND_THREE,))

    assert [copies(v) for v in own] == [
        *[[2.0, 2.0], [2.0, 2.0], [1.0, 3.0]],
        *[[12.0, 12.0], [12.0, 12.0], [11.0, 13.0]],
        *[[8.0, 8.0], [8.0, 8.0], [9.0, 7.0]],
    ]


@pytest.mark.parametrize("call", CALLS)
def test_without_aggregation_an_on_read_variable_is_changed_across_replicas_only_without_reading(
    two: jaxdist.Strategy, call: str
) -> None:
    v = made(two, synchronization=ON_READ)

    with refused(ArgumentError, "'w'", "NONE", "read_value=False"):
        getattr(v, call)(2.0)
    assert copies(v) == [10.0, 10.0]
    assert getattr(v, call)(2.0, read_value=False) is None
    assert copies(v) == [AFTER_TWO[call]] * 2


@pytest.mark.parametrize("read_value", [True, False])
@pytest.mark.parametrize("call", ["assign_add", "assign_sub"])
def test_one_value_is_never_added_to_a_sum_across_replicas(
    two: jaxdist.Strategy, call: str, read_value: bool
) -> None:
    v = made(two, synchronization=ON_READ, aggregation=SUM)

    with refused(ArgumentError, "'w'", call):
        getattr(v, call)(2.0, read_value=read_value)
    assert copies(v) == [10.0, 10.0]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_across_replicas_each_copy_of_an_on_read_variable_is_changed_by_the_one_value(
    two: jaxdist.Strategy, aggregation: VariableAggregation, call: str
) -> None:
    v = made(two, synchronization=ON_READ, aggregation=aggregation)

    assert float(getattr(v, call)(2.0)) == AFTER_TWO[call]
    assert copies(v) == [AFTER_TWO[call]] * 2


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_across_replicas_an_on_read_variable_reads_and_assigns_as_one_plain_value(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    v = made(two, synchronization=ON_READ, aggregation=aggregation)

    for result in (v.assign(2.0), v.read_value(), v + 0):
        assert is_plain(result)
        assert float(result) == 2.0


# Rows

CHANGES: dict[str, Callable[..., None]] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
}
PICKS: dict[str, Callable[..., None]] = {
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda before, at, rows: before.__setitem__(at, rows),
}


def _rows_that_count(aggregation: VariableAggregation, given: list[float]) -> list[float]:
    """Those that are applied to each copy, one after the other."""
    if aggregation in (FIRST, NONE):
        return given[:1]
    return [x / 2 for x in given] if aggregation is MEAN else given


@pytest.mark.parametrize(
    ("aggregation", "given"),
    [(NONE, [3.0, 3.0])] + [(a, g) for a in (SUM, MEAN, FIRST) for g in ([1.0, 3.0], [3.0, 3.0])],
)
@pytest.mark.both_executors
def test_rows_that_replicas_give_are_applied_by_the_aggregation(
    two: jaxdist.Strategy, aggregation: VariableAggregation, given: list[float]
) -> None:
    models = CHANGES | (PICKS if aggregation in (NONE, FIRST) else {})
    variables = {name: made(two, [1.0, 2.0, 3.0], aggregation=aggregation) for name in models}
    # One array for both replicas is what can be proved equal.
    rows = (
        placed(two, np.array(given[:1], np.float32))
        if aggregation is NONE
        else PerReplica([np.array([x], np.float32) for x in given])
    )

    def step(rows: Any) -> None:
        for name, v in variables.items():
            getattr(v, name)(IndexedSlices(rows, jnp.array([1])))

    two.run(step, (rows,))

    for name, model in models.items():
        expected = np.array([1.0, 2.0, 3.0])
        for row in _rows_that_count(aggregation, given):
            model(expected, [1], row)
        np.testing.assert_allclose(copies(variables[name]), [expected] * 2, rtol=1e-6)


@pytest.mark.parametrize("name", CHANGES | PICKS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_given_across_replicas_change_each_copy_once_whatever_the_aggregation(
    two: jaxdist.Strategy, aggregation: VariableAggregation, name: str
) -> None:
    v, expected = made(two, [1.0, 2.0, 3.0], aggregation=aggregation), np.array([1.0, 2.0, 3.0])

    getattr(v, name)(IndexedSlices([4.0], [1]))

    (CHANGES | PICKS)[name](expected, [1], 4.0)
    assert copies(v) == [expected.tolist()] * 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.both_executors
def test_rows_of_on_read_variables_are_never_changed(
    two: jaxdist.Strategy, aggregation: VariableAggregation
) -> None:
    v = made(two, [1.0, 2.0], synchronization=ON_READ, aggregation=aggregation)
    rows = IndexedSlices([4.0], [1])

    def step() -> None:
        for name in CHANGES | PICKS:
            with pytest.raises(NotImplementedError, match="'w'"):
                getattr(v, name)(rows)

    step()
    two.run(step)
    assert copies(v) == [[1.0, 2.0]] * 2


# Checkpoints


def _restored(saved: Any, count: int | None, **options: Any) -> list[float]:
    """The copies of a new variable, on `count` replicas or without a strategy."""
    v = Variable(0.0, **options) if count is None else made(strategy_of(count), 0.0, **options)
    Variable.assign(v, saved)
    return copies(v)


@pytest.mark.parametrize(
    ("synchronization", "aggregation", "own", "saved", "on_two"),
    [
        *[(ON_WRITE, how, None, 10.0, 10.0) for how in AGGREGATIONS],
        (ON_READ, SUM, [1.0, 3.0], 4.0, 2.0),
        (ON_READ, SUM, [3.0, 4.0], 7.0, 3.5),
        (ON_READ, MEAN, [1.0, 3.0], 2.0, 2.0),
        (ON_READ, FIRST, [1.0, 3.0], 1.0, 1.0),
    ],
)
def test_a_file_holds_one_plain_array_that_variables_of_any_strategy_take(
    two: jaxdist.Strategy,
    tmp_path: Path,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    own: list[float] | None,
    saved: float,
    on_two: float,
) -> None:
    modes: dict[str, Any] = {"synchronization": synchronization, "aggregation": aggregation}
    v = made(two, **modes)
    if own is not None:
        v.assign(PerReplica(own), read_value=False)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, jax.tree.map(jnp.asarray, {"w": v}), {})
        like = {"w": jax.ShapeDtypeStruct((), np.float32)}
        found = checkpoints.restore(1, like=like).state["w"]

    assert float(found) == saved
    assert _restored(found, None, **modes) == [saved]
    assert _restored(found, 1, **modes) == [saved]
    assert _restored(found, 2, **modes) == [on_two] * 2
    is_shared_out = synchronization is ON_READ and aggregation is SUM
    on_three = saved / 3 if is_shared_out else saved
    np.testing.assert_allclose(_restored(found, 3, **modes), [on_three] * 3, rtol=1e-6)


def test_what_was_saved_without_a_strategy_is_restored_under_one(tmp_path: Path) -> None:
    plain = Variable([3.0, 5.0])
    total = made(strategy_of(2), [0.0, 0.0], synchronization=ON_READ, aggregation=SUM)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": plain.read_value()}, {})
        total.assign(checkpoints.restore(1, like={"w": plain.read_value()}).state["w"])

    assert copies(total) == [[1.5, 2.5], [1.5, 2.5]]


def test_an_on_read_variable_without_aggregation_has_no_value_to_save(
    two: jaxdist.Strategy,
) -> None:
    state = {"w": made(two, synchronization=ON_READ)}

    with refused(ArgumentError, "'w'", "NONE"):
        jax.tree.map(jax.numpy.asarray, state)


def test_saving_an_on_read_variable_without_aggregation_is_a_value_error(
    two: jaxdist.Strategy, tmp_path: Path
) -> None:
    state = {"w": made(two, synchronization=ON_READ)}

    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="'w'"):
        checkpoints.save(1, state, {})


# Random numbers


def _drawn(rngs: Any) -> Any:
    return jax.random.normal(rngs(), (3,))


def _made_rngs(strategy: jaxdist.Strategy, seed: int = 0) -> Any:
    with strategy.scope():
        return nnx.Rngs(seed)


@pytest.mark.both_executors
def test_replicas_draw_different_numbers_from_a_generator_made_in_a_scope(
    two: jaxdist.Strategy,
) -> None:
    rngs = _made_rngs(two)

    draws = [np.asarray(v).tobytes() for _ in range(2) for v in two.run(_drawn, (rngs,)).values]

    assert len(set(draws)) == 4


@pytest.mark.both_executors
def test_a_draw_across_replicas_moves_the_generators_of_all_replicas_on(
    two: jaxdist.Strategy,
) -> None:
    rngs, other = _made_rngs(two), _made_rngs(two)

    across = _drawn(rngs)
    after = two.run(_drawn, (rngs,))
    two.run(_drawn, (other,))
    second = two.run(_drawn, (other,))

    assert is_plain(across)
    for a, b in zip(after.values, second.values, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(rngs.default.count[...]) == int(other.default.count[...]) == 2


@pytest.mark.both_executors
def test_a_generator_goes_on_where_it_was_saved_on_another_number_of_replicas(
    two: jaxdist.Strategy, tmp_path: Path
) -> None:
    rngs, three = _made_rngs(two), strategy_of(3)
    two.run(_drawn, (rngs,))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, nnx.to_pure_dict(nnx.state(rngs)), {})
        restored = _made_rngs(three, seed=5)
        state = nnx.state(restored)
        like = nnx.to_pure_dict(state)
        nnx.replace_by_pure_dict(state, checkpoints.restore(1, like=like).state)
    nnx.update(restored, state)

    expected = [np.asarray(v).tolist() for v in two.run(_drawn, (rngs,)).values]
    found = [np.asarray(v).tolist() for v in three.run(_drawn, (restored,)).values]
    assert found[:2] == expected
    assert found[2] not in expected


@pytest.mark.both_executors
def test_numbers_made_from_a_key_are_the_same_on_all_replicas(two: jaxdist.Strategy) -> None:
    key = jax.random.key(3)

    found = two.run(lambda: jax.random.normal(key, (2,)))

    assert is_plain(found)
    np.testing.assert_array_equal(found, jax.random.normal(key, (2,)))
