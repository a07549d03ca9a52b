"""`ReplicaContext.all_reduce`: values, dtypes, structures, errors."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, PerReplica, ReduceOp, Strategy
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DivergentCollectiveError,
    ShapeError,
)
from tests.strategies.oracle import assert_each, each, is_plain, per_replica, refused

pytestmark = pytest.mark.both_executors


def _all_reduce(op: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce(op, value, *args, **kwargs)


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _documented() -> PerReplica:
    return PerReplica([np.array([1.0, 2.0], np.float32), np.array([3.0, 5.0], np.float32)])


def test_the_documented_numbers(two: Strategy) -> None:
    total, mean = two.run(
        lambda x: (_all_reduce("SUM", x), _all_reduce(ReduceOp.MEAN, x)), (_documented(),)
    )
    assert_each(two, total, [[4.0, 7.0]] * 2)
    assert_each(two, mean, [[2.0, 3.5]] * 2)


def test_sum_and_mean_are_those_of_numpy_and_the_same_everywhere(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(3).normal(size=(count, 2, 3)).astype(np.float32)
    total, mean = strategy.run(
        lambda x: (_all_reduce("sum", x), _all_reduce("mean", x)),
        (per_replica(strategy, lambda r: rows[r]),),
    )
    assert is_plain(total)
    assert is_plain(mean)
    np.testing.assert_allclose(total, rows.sum(0), rtol=1e-5)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "sums_to", "mean_is"),
    [
        ("bool", "int32", "float32"),
        ("int8", "int8", "float32"),
        ("uint8", "uint8", "float32"),
        ("int32", "int32", "float32"),
        ("uint32", "uint32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("complex64", "complex64", "complex64"),
    ],
)
@pytest.mark.parametrize("logical", [1, 2])
def test_every_dtype_has_the_documented_sum_and_mean(
    dtype: str, sums_to: str, mean_is: str, logical: int
) -> None:
    if logical == 1:
        strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    else:
        devices = np.asarray(jax.devices()[:4], dtype=object).reshape(2, 2)
        mesh = jax.sharding.Mesh(devices, ("data", "model"))
        strategy = MirroredStrategy(mesh=mesh, replica_axes="data")
    x = PerReplica([jnp.asarray([1, 0], dtype), jnp.asarray([1, 1], dtype)])
    total, mean = strategy.run(lambda x: (_all_reduce("SUM", x), _all_reduce("MEAN", x)), (x,))
    assert (str(total.dtype), str(mean.dtype)) == (sums_to, mean_is)
    np.testing.assert_allclose(np.asarray(total, np.complex64), [2, 1])
    np.testing.assert_allclose(np.asarray(mean, np.complex64), [1, 0.5])


def test_mixed_dtypes_are_reduced_in_one_call(two: Strategy) -> None:
    def step(x: Any) -> Any:
        value = {
            "f32": x,
            "f16": (x.astype("float16"), [x.astype("bfloat16")]),
            "int": x.astype(int),
        }
        return _all_reduce("SUM", value)

    got = two.run(step, (_documented(),))
    assert list(map(str, (got["f32"].dtype, got["f16"][0].dtype, got["f16"][1][0].dtype))) == [
        "float32",
        "float16",
        "bfloat16",
    ]
    assert type(got["f16"]) is tuple
    assert type(got["f16"][1]) is list
    assert got["int"].dtype == jnp.int32
    for leaf in jax.tree.leaves(got):
        assert np.asarray(leaf, np.float32).tolist() == [4, 7]


@pytest.mark.a_device_for_each
def test_all_leaves_of_one_dtype_are_one_all_reduce(strategy: Strategy) -> None:
    def step(x: Any) -> Any:
        return _all_reduce("MEAN", {"a": x, "b": [x * 2, x + 1]})

    x = per_replica(strategy, lambda r: np.ones(2, np.float32))
    compiled = strategy.lower(step, (x,)).compile().collectives
    if strategy.num_replicas_in_sync > 1:
        # Small ones are one operand, unless logical devices may divide them in different ways.
        operands = 1 if strategy.layout.num_logical == 1 else 3
        assert [(c.kind, c.operands) for c in compiled] == [("all-reduce", operands)]
    else:
        assert not compiled


def test_python_numbers_are_those_of_every_replica(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    one, half, flag = strategy.run(lambda: _all_reduce("SUM", (1, 0.5, True)))
    assert (int(one), float(half), int(flag)) == (count, count / 2, count)
    assert one.dtype == jnp.int32
    assert float(strategy.run(lambda: _all_reduce("MEAN", 3))) == 3.0


@pytest.mark.parametrize("value", [[], {}, (), None], ids=repr)
def test_an_empty_structure_comes_back_as_it_is(two: Strategy, value: Any) -> None:
    assert two.run(lambda: _all_reduce("SUM", value)) == value


def test_structures_with_nothing_in_places_are_kept(two: Strategy) -> None:
    got = two.run(lambda x: _all_reduce("SUM", {"a": None, "b": (x, [])}), (_documented(),))
    assert got["a"] is None
    assert got["b"][1] == []
    assert got["b"][0].tolist() == [4, 7]


def test_an_array_without_elements_is_reduced_to_itself(strategy: Strategy) -> None:
    got = strategy.run(lambda: _all_reduce("MEAN", jnp.ones((0, 3))))
    assert got.shape == (0, 3)


def test_constants_and_sums_of_nothing_are_reduced(strategy: Strategy) -> None:
    dtypes = [np.complex64, np.float32, np.int32]

    def step(x: Any, nothing: Any) -> Any:
        constants = [jnp.full(2, 3, d) for d in dtypes]
        return x, *_all_reduce("sum", (constants, [n.sum(axis=0) for n in nothing]))

    # JAX cannot compile a mapped function of which no argument has elements.
    _, constants, sums = strategy.run(step, (1.0, [np.zeros((0, 2), d) for d in dtypes]))
    for have in constants:
        np.testing.assert_array_equal(have, [3 * strategy.num_replicas_in_sync] * 2)
    for have in sums:
        np.testing.assert_array_equal(have, [0, 0])


def test_ones_sum_to_the_number_of_replicas(strategy: Strategy) -> None:
    got = strategy.run(lambda: _all_reduce(ReduceOp.SUM, jnp.ones(2)))
    assert got.tolist() == [strategy.num_replicas_in_sync] * 2


@pytest.mark.parametrize("around", ["jit", "vmap", "scan", "remat", "cond", "while"])
def test_all_reduce_works_under_jaxs_transformations(two: Strategy, around: str) -> None:
    def total(x: Any) -> Any:
        return _all_reduce("SUM", x)

    def loop(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, total(c[1])), (0, x))[1]

    wrapped: dict[str, Callable[[Any], Any]] = {
        "jit": jax.jit(total),
        "vmap": jax.vmap(total),
        "scan": lambda x: jax.lax.scan(lambda c, row: (c, total(row)), 0, x)[1],
        "remat": jax.checkpoint(total),
        "cond": lambda x: jax.lax.cond(_all_reduce("SUM", x[0]) > 0, total, jnp.negative, x),
        "while": loop,
    }
    got = two.run(lambda x: wrapped[around](x), (_documented(),))
    assert_each(two, got, [[4.0, 7.0]] * 2)


@pytest.mark.compiled
@pytest.mark.parametrize("around", ["cond", "while", "switch"])
def test_all_reduce_that_replicas_may_not_reach_is_refused_with_the_remedy(
    two: Strategy, around: str
) -> None:
    def total(x: Any) -> Any:
        return _all_reduce("SUM", x)

    def step(x: Any) -> Any:
        if around == "cond":
            return jax.lax.cond(x[0] > 1, total, jnp.negative, x)
        if around == "switch":
            return jax.lax.switch(x[0].astype(int), [total, jnp.negative], x)
        return jax.lax.while_loop(lambda x: x[0] < 4, total, x)

    with refused(
        DivergentCollectiveError,
        "psum",
        "test_all_reduce.py",
        "branch or loop",
        "all_reduce it",
        "jnp.where",
        "jaxdist.assume_replicated",
    ):
        two.run(step, (_documented(),))
    # Nothing hangs and nothing is stuck.
    assert_each(two, two.run(total, (_documented(),)), [[4.0, 7.0]] * 2)


def test_a_promise_that_the_branch_is_taken_alike_is_believed(two: Strategy) -> None:
    def step(x: Any) -> Any:
        flag = jaxdist.assume_replicated(x[0] > 0)
        return jax.lax.cond(flag, lambda x: _all_reduce("SUM", x), jnp.negative, x)

    assert_each(two, two.run(step, (_documented(),)), [[4.0, 7.0]] * 2)


# Options


def test_both_names_of_the_options_at_once_and_what_is_no_options_are_refused(
    two: Strategy,
) -> None:
    o = jaxdist.experimental.CommunicationOptions()
    with refused(ArgumentError, "both options and experimental_hints"):
        two.run(lambda x: _all_reduce("SUM", x, o, experimental_hints=o), (_documented(),))
    with refused(ArgumentTypeError, "'o'", "CommunicationOptions"):
        two.run(lambda x: _all_reduce("SUM", x, "o"), (_documented(),))


# Errors


class _Aggregation(enum.Enum):
    SUM = 1


@pytest.mark.parametrize("op", ["max", None, _Aggregation.SUM, 0], ids=repr)
def test_an_unknown_op_is_refused_with_the_valid_ones(two: Strategy, op: Any) -> None:
    with refused(ArgumentError, "ReplicaContext.all_reduce", repr(op), "a jaxdist.ReduceOp"):
        two.run(lambda x: _all_reduce(op, x), (_documented(),))


def test_an_unknown_op_is_refused_outside_every_strategy_too() -> None:
    with refused(ArgumentError, "'max'", "'SUM'"):
        _all_reduce("max", 1.0)


@pytest.mark.parametrize("value", ["text", b"b", object()], ids=["str", "bytes", "object"])
def test_what_has_no_sum_is_named_and_refused(two: Strategy, value: Any) -> None:
    with refused(
        ArgumentTypeError,
        "ReplicaContext.all_reduce cannot reduce value['a'][1]",
        type(value).__name__,
    ):
        two.run(lambda x: _all_reduce("SUM", {"a": [x, value]}), (_documented(),))


def test_random_keys_are_named_and_refused(two: Strategy) -> None:
    with refused(ArgumentTypeError, "value['key']", "key<"):
        two.run(lambda: _all_reduce("SUM", {"key": jax.random.key(0)}))


def test_uneven_values_are_refused_and_later_collectives_work(two: Strategy) -> None:
    def step(x: Any) -> Any:
        return _all_reduce("SUM", x)

    with refused(ShapeError, "replicas [0]: float32[2]", "replicas [1]: float32[1]"):
        two.run(step, (PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)]),))
    assert_each(two, two.run(step, (_documented(),)), [[4.0, 7.0]] * 2)
    other = MirroredStrategy()
    got = other.run(step, (per_replica(other, lambda r: np.ones(1, np.float32)),))
    assert each(other, got)[0].tolist() == [8.0]


# ReduceOp


def test_reduce_op_has_the_documented_members_and_values() -> None:
    assert [(op.name, op.value) for op in ReduceOp] == [("SUM", "SUM"), ("MEAN", "MEAN")]
    assert ReduceOp("MEAN") is ReduceOp.MEAN
