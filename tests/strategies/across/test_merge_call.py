"""`ReplicaContext.merge_call`: code that runs once, across the replicas, within a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, Strategy, Variable
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DivergentCollectiveError,
    NoRowsError,
    ReplicaValueError,
    ShapeError,
    UnsupportedError,
)
from tests.strategies.oracle import assert_each, is_plain, per_replica, refused

pytestmark = pytest.mark.both_executors


def _merge(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return jaxdist.get_replica_context().merge_call(fn, args=args, kwargs=kwargs)


def _id() -> jax.Array:
    return jaxdist.get_replica_context().replica_id_in_sync_group


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _ids(strategy: Strategy) -> PerReplica:
    return per_replica(strategy, lambda r: float(r + 1))


def test_the_merge_function_gets_the_strategy_and_per_replica_arguments(
    strategy: Strategy,
) -> None:
    seen = []

    def merge(given: Strategy, x: Any, nested: Any, *, flag: Any) -> None:
        seen.append((given, type(x).__name__, isinstance(x, PerReplica), flag))
        assert isinstance(nested["a"][0], PerReplica)
        assert nested["b"] == 7

    def step(x: Any) -> None:
        _merge(merge, x, {"a": [x], "b": 7}, flag="text")

    strategy.run(step, (_ids(strategy),))
    [(given, _, is_per_replica, flag)] = seen
    assert given is strategy
    assert is_per_replica
    assert flag == "text"


def test_the_merge_function_runs_once_for_all_replicas(strategy: Strategy) -> None:
    calls = []
    strategy.run(lambda: _merge(lambda s: calls.append(1)))
    assert len(calls) == 1


def test_a_reduced_argument_reaches_every_replica_and_comes_back_plain(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    total = strategy.run(
        lambda x: _merge(lambda s, a: s.reduce("SUM", a, axis=None), x), (_ids(strategy),)
    )
    assert is_plain(total)
    assert_each(strategy, total, [count * (count + 1) / 2] * count)


def test_a_constant_result_reaches_every_replica(strategy: Strategy) -> None:
    assert strategy.run(lambda: _merge(lambda s: 12)) == 12
    assert strategy.run(lambda: _merge(lambda s: {"a": None, "b": "text"})) == {
        "a": None,
        "b": "text",
    }


def test_a_per_replica_result_gives_each_replica_its_own_value(strategy: Strategy) -> None:
    got = strategy.run(lambda x: _merge(lambda s, a: {"own": a, "list": [a]}, x), (_ids(strategy),))
    want = [r + 1.0 for r in range(strategy.num_replicas_in_sync)]
    assert_each(strategy, got["own"], want)
    assert_each(strategy, got["list"][0], want)


def test_a_per_replica_made_in_the_merge_function_gives_each_replica_its_own_value(
    strategy: Strategy,
) -> None:
    def swap(_: Strategy, x: PerReplica) -> Any:
        return {"back": PerReplica(x.values[::-1])}

    count = strategy.num_replicas_in_sync
    got = strategy.run(lambda x: _merge(swap, x), (_ids(strategy),))
    assert_each(strategy, got["back"], [float(count - r) for r in range(count)])


def test_a_per_replica_of_constants_gives_each_replica_its_own_value(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    got = strategy.run(lambda: _merge(lambda s: PerReplica([10 * r for r in range(count)])))
    assert_each(strategy, got, [10 * r for r in range(count)])


def test_a_per_replica_of_the_wrong_length_made_in_a_merge_function_is_refused(
    two: Strategy,
) -> None:
    with refused(ReplicaValueError, "3 values", "2 replicas"):
        two.run(lambda: _merge(lambda s: {"x": PerReplica([1, 2, 3])}))


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_in_a_merge_function_is_reduce_outside(two: Strategy, op: str, axis: Any) -> None:
    x = per_replica(two, lambda r: np.arange(6, dtype=np.float32).reshape(2, 3) * (r + 1))
    inside = two.run(lambda x: _merge(lambda s, a: s.reduce(op, {"x": a}, axis)["x"], x), (x,))
    np.testing.assert_allclose(inside, two.reduce(op, x, axis), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("axis", [None, 0])
def test_reduce_in_a_merge_function_has_the_dtype_of_reduce_outside(
    two: Strategy, op: str, dtype: str, axis: Any
) -> None:
    x = per_replica(two, lambda r: jnp.asarray([1, r], dtype))
    inside = two.run(lambda x: _merge(lambda s, a: s.reduce(op, a, axis), x), (x,))
    outside = two.reduce(op, x, axis)
    assert inside.dtype == outside.dtype
    np.testing.assert_array_equal(np.asarray(inside, "f4"), np.asarray(outside, "f4"))


def test_the_mean_over_no_rows_in_a_merge_function_is_named(two: Strategy) -> None:
    x = per_replica(two, lambda r: np.ones((0,), np.float32))
    with refused(NoRowsError, "a mean over no rows", "[0, 0]"):
        two.run(lambda x: _merge(lambda s, a: s.reduce("MEAN", a, axis=0), x), (x,))


def test_gather_in_a_merge_function_is_gather_outside(strategy: Strategy) -> None:
    def merge(s: Strategy, x: PerReplica) -> Any:
        return [s.gather({"x": x}, axis)["x"] for axis in (0, 1, -1)]

    x = per_replica(strategy, lambda r: np.full((2, 2), r))
    inside = strategy.run(lambda x: _merge(merge, x), (x,))
    for got, axis in zip(inside, (0, 1, -1), strict=True):
        assert is_plain(got)
        np.testing.assert_array_equal(got, strategy.gather(x, axis))


def test_a_per_replica_made_in_a_merge_function_is_reduced_and_gathered(two: Strategy) -> None:
    def merge(s: Strategy) -> Any:
        made = PerReplica([jnp.asarray([1.0]), jnp.asarray([2.0])])
        return s.reduce("SUM", made, axis=None), s.reduce("MEAN", made, 0), s.gather(made, 0)

    total, mean, rows = two.run(lambda: _merge(merge))
    assert (total.tolist(), float(mean), rows.tolist()) == ([3.0], 1.5, [1.0, 2.0])


def test_reduce_to_batch_reduce_to_and_broadcast_to_work_in_a_merge_function(
    two: Strategy,
) -> None:
    def merge(s: Strategy, x: PerReplica) -> Any:
        one = s.extended.reduce_to("SUM", x, x)
        many = s.extended.batch_reduce_to("MEAN", [(x, x), (x, "cpu:0")])
        return one, many, s.extended.broadcast_to(one * 2, x)

    one, many, sent = two.run(lambda x: _merge(merge, x), (_ids(two),))
    assert [float(v) for v in (one, *many, sent)] == [3.0, 1.5, 1.5, 6.0]


def test_broadcasting_a_per_replica_value_is_refused_with_the_remedy(two: Strategy) -> None:
    with refused(ArgumentTypeError, "tensor['x']", "PerReplica", "Reduce it first"):
        two.run(
            lambda x: _merge(lambda s, a: s.extended.broadcast_to({"x": a}, a), x), (_ids(two),)
        )


def test_values_and_local_results_in_a_merge_function_are_an_all_gather(
    strategy: Strategy,
) -> None:
    def by_values(s: Strategy, x: PerReplica) -> Any:
        return jnp.stack(x.values)

    def by_results(s: Strategy, x: PerReplica) -> Any:
        return jnp.stack([r["x"] for r in s.experimental_local_results({"x": x})])

    count = strategy.num_replicas_in_sync
    for merge in (by_values, by_results):

        def step(x: Any, merge: Any = merge) -> Any:
            return _merge(merge, x)

        got = strategy.run(step, (_ids(strategy),))
        assert is_plain(got)
        assert got.tolist() == [r + 1.0 for r in range(count)]
        if count > 1:
            kinds = [c.kind for c in strategy.lower(step, (_ids(strategy),)).traced_collectives]
            assert kinds == ["all_gather"]


def test_merge_call_without_a_collective_costs_none(two: Strategy) -> None:
    program = two.lower(lambda x: _merge(lambda s, a: a, x), (_ids(two),))
    assert program.traced_collectives == ()


def test_merge_call_has_the_gradient_of_what_it_does(two: Strategy) -> None:
    def loss(x: Any) -> Any:
        return _merge(lambda s, a: s.reduce("SUM", a, axis=None), x * x) * (_id() + 1.0)

    got = two.run(jax.grad(loss), (_ids(two),))
    assert_each(two, got, [3.0 * 2 * 1, 3.0 * 2 * 2])


def test_merge_call_works_in_control_flow_that_all_replicas_take_alike(two: Strategy) -> None:
    def total(x: Any) -> Any:
        return _merge(lambda s, a: s.reduce("SUM", a, axis=None), x)

    def step(flag: Any, x: Any) -> Any:
        taken = jax.lax.cond(flag > 0, total, lambda x: x * 0, x)
        looped, _ = jax.lax.scan(lambda c, _: (total(c), None), x, length=2)
        return taken, looped

    taken, looped = two.run(step, (1, _ids(two)))
    assert_each(two, taken, [3.0, 3.0])
    assert_each(two, looped, [6.0, 6.0])


@pytest.mark.compiled
def test_merge_call_in_a_branch_that_replicas_may_take_differently_is_refused(
    two: Strategy,
) -> None:
    def step(x: Any) -> Any:
        return jax.lax.cond(
            x > 1.0,
            lambda x: _merge(lambda s, a: s.reduce("SUM", a, axis=None), x),
            jnp.negative,
            x,
        )

    with refused(
        DivergentCollectiveError, "test_merge_call.py", "branch", "jnp.where", "assume_replicated"
    ):
        two.run(step, (_ids(two),))


def test_a_value_that_a_merge_function_closes_over_is_summed_over_the_replicas(
    two: Strategy,
) -> None:
    def step(x: Any) -> Any:
        return _merge(lambda s: s.reduce("SUM", x, axis=None))

    assert_each(two, two.run(step, (_ids(two),)), [3.0, 3.0])


def test_a_reduced_value_that_is_reduced_again_counts_once_for_each_replica(
    two: Strategy,
) -> None:
    def merge(s: Strategy, x: Any) -> Any:
        total = s.reduce("SUM", x, axis=None)
        return s.reduce("MEAN", total, axis=None), s.reduce("SUM", total, axis=None)

    mean, twice = two.run(lambda x: _merge(merge, x), (_ids(two),))
    assert (float(mean), float(twice)) == (3.0, 6.0)


def test_exceptions_of_a_merge_function_keep_their_type(strategy: Strategy) -> None:
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: _merge(lambda s: 1 / 0))


def test_arithmetic_on_a_handle_is_refused_with_the_remedy(two: Strategy) -> None:
    with refused(ArgumentTypeError, "strategy.reduce"):
        two.run(lambda x: _merge(lambda s, a: a + 1, x), (_ids(two),))


def test_errors_in_a_merge_function_name_the_leaf(two: Strategy) -> None:
    x = per_replica(two, lambda r: np.ones(2, np.float32))
    cases = [
        (ShapeError, lambda s, a: s.reduce("SUM", {"x": a}, axis=3), ["axis=3", "value['x']"]),
        (ShapeError, lambda s, a: s.gather({"x": a}, axis=1), ["axis=1", "value['x']", "rank 1"]),
        (ArgumentError, lambda s, a: s.reduce("max", a, axis=None), ["'max'", "'SUM'"]),
        (ArgumentTypeError, lambda s, a: s.reduce("SUM", a, axis=[0]), ["axis=[0]"]),
    ]
    for error, merge, parts in cases:
        with refused(error, *parts):
            MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda x, m=merge: _merge(m, x), (x,))


def test_what_is_no_function_is_refused(two: Strategy) -> None:
    def step() -> None:
        with refused(ArgumentTypeError, "ReplicaContext.merge_call was given", "int"):
            jaxdist.get_replica_context().merge_call(3)  # type: ignore[arg-type]
        with refused(ArgumentTypeError, "merge_call was given args=", "args is a list or tuple"):
            jaxdist.get_replica_context().merge_call(lambda s: 1, args=1)  # type: ignore[arg-type]

    two.run(step)


# Once, and by all


@pytest.fixture
def variables(two: Strategy) -> tuple[Variable, Variable]:
    with two.scope():
        mirrored = Variable(10.0)
        own = Variable(
            10.0,
            synchronization=jaxdist.VariableSynchronization.ON_READ,
            aggregation=jaxdist.VariableAggregation.SUM,
        )
    return mirrored, own


class _Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def merge(self, s: Strategy, x: Any) -> Any:
        return s.reduce("SUM", x, axis=None) + s.reduce("SUM", self.value, axis=None)


def test_a_merge_function_that_changes_variables_under_grad_runs_once(
    two: Strategy, variables: tuple[Variable, Variable]
) -> None:
    mirrored, own = variables
    calls = []

    def merge(s: Strategy, v: Variable, x: Any) -> Any:
        calls.append(v is mirrored)
        total = s.reduce("SUM", x, axis=None)
        v.assign_add(total)
        own.assign(total)
        return total * v, [x, "text", None, 3]

    def loss(x: Any) -> Any:
        value, (back, *constants) = _merge(merge, mirrored, x * x)
        assert constants == ["text", None, 3]
        return value + back

    got = two.run(lambda x: jax.value_and_grad(loss)(x), (_ids(two),))

    assert calls == [True]
    # 15 = 10 + 1 + 4, a constant for the gradient.
    assert (float(mirrored), float(own)) == (15.0, 5.0)
    assert_each(two, got[0], [5 * 15.0 + 1, 5 * 15.0 + 4])
    assert_each(two, got[1], [(2 * 15.0 + 1) * 2.0, (2 * 15.0 + 1) * 4.0])


def test_what_a_merge_function_reaches_through_an_object_is_each_replicas_own(
    two: Strategy,
) -> None:
    def step(x: Any) -> Any:
        return _merge(_Holder(x * 10).merge, x)

    assert_each(two, two.run(step, (_ids(two),)), [33.0, 33.0])


def test_a_merge_function_in_a_vmap_and_in_another_function_runs_once(two: Strategy) -> None:
    calls = []

    def step(x: Any) -> Any:
        def merge(s: Strategy, row: Any) -> Any:
            calls.append(1)
            return s.reduce("SUM", row, axis=None) + x.sum()

        return jax.vmap(lambda row: _merge(merge, row))(x)

    x = per_replica(two, lambda r: np.arange(2, dtype=np.float32) + r)
    got = two.run(step, (x,))
    assert calls == [1]
    assert_each(two, got, [[2.0, 4.0], [4.0, 6.0]])


def test_replicas_that_call_merge_unequally_often_are_refused(two: Strategy) -> None:
    def step(x: Any) -> Any:
        _merge(lambda s: None)
        if len(x) > 1:
            _merge(lambda s: None)
        return x.sum()

    x = PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)])
    with refused(DivergentCollectiveError, "test_merge_call.py", "merge_call"):
        two.run(step, (x,))


def test_a_merge_call_in_a_branch_that_replicas_may_take_differently_is_refused_at_any_rate(
    two: Strategy,
) -> None:
    def step(x: Any) -> Any:
        return jax.lax.cond(x > 1.0, lambda: _merge(lambda s: 1.0), lambda: 2.0)

    with refused(DivergentCollectiveError, "test_merge_call.py"):
        two.run(step, (_ids(two),))


# `run` in a merge function


def test_run_in_a_merge_function_gives_each_replica_its_own(
    two: Strategy, variables: tuple[Variable, Variable]
) -> None:
    mirrored, own = variables

    def inner(x: Any, *, scale: Any) -> Any:
        context = jaxdist.get_replica_context()
        assert not jaxdist.in_cross_replica_context()
        own.assign_add(x)
        mirrored.assign(context.all_reduce("sum", x))
        return {"x": x * scale + _id(), "text": "same", "v": mirrored}

    def merge(s: Strategy, x: Any) -> Any:
        found = s.run(inner, (x,), {"scale": 10.0})
        assert jaxdist.get_replica_context() is None
        assert isinstance(found["x"], PerReplica)
        assert (found["text"], found["v"] is mirrored) == ("same", True)
        again = s.run(lambda y: y + 1, (found["x"],))
        return s.reduce("SUM", again, axis=None), again

    total, again = two.run(lambda x: _merge(merge, x), (_ids(two),))
    assert float(total) == 11.0 + 22.0
    assert_each(two, again, [11.0, 22.0])
    assert ([float(v) for v in own.values], float(mirrored)) == ([11.0, 12.0], 3.0)


def test_run_in_a_replica_and_lower_in_a_merge_function_are_refused(two: Strategy) -> None:
    def step() -> None:
        with refused(ContextError, "inside a replica"):
            two.run(lambda: 1)
        _merge(lambda s: s.run(lambda: _merge(lambda t: t.run(lambda: 1))))

        def lowers(s: Strategy) -> None:
            with refused(ContextError, "in a merge function"):
                s.lower(lambda: 1)

        _merge(lowers)

    two.run(step)


def test_a_sparse_matrix_is_refused_in_a_merge_function_as_outside(two: MirroredStrategy) -> None:
    matrix = sparse.BCOO.fromdense(jnp.eye(2))

    def step() -> Any:
        return _merge(lambda strategy, m: strategy.reduce("SUM", m, axis=None), matrix)

    with pytest.raises(UnsupportedError, match="Its indices are arrays like its numbers"):
        two.run(step)
