"""`Strategy.reduce`: one value out of those of the replicas."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, ReduceOp, Strategy
from jaxdist.errors import ArgumentError, ArgumentTypeError, ReplicaValueError, ShapeError
from tests.strategies.oracle import is_free, is_plain, per_replica, placed, refused, split

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _name(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def _kind(value: Any) -> str:
    return type(value).__name__


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _identity(x: Any) -> Any:
    return x


def _pr(*values: Any) -> PerReplica:
    return PerReplica([np.asarray(v, np.float32) for v in values])


# The documented table

TABLE: list[tuple[str, tuple[Any, ...], Any, Any]] = [
    ("SUM", ([1, 2], [3, 4]), None, [4, 6]),
    ("MEAN", ([1, 2], [3, 4]), None, [2, 3]),
    ("SUM", (1, 3), None, 4),
    ("SUM", ([1, 2, 3], [10]), 0, 16),
    ("MEAN", ([1, 2, 3], [10]), 0, 4),
    ("MEAN", ([1, 2, 3], []), 0, 2),
    ("SUM", ([1, 2, 3], []), 0, 6),
    ("MEAN", ([], []), 0, np.nan),
    ("SUM", ([], []), 0, 0),
    ("MEAN", ([[1, 2], [3, 4]], [[5, 6]]), 0, [3, 4]),
    ("MEAN", ([[1, 2], [3, 4]], [[5, 6], [7, 8]]), 1, [3.5, 5.5]),
    ("MEAN", ([[1, 2], [3, 4]], [[5, 6], [7, 8]]), -1, [3.5, 5.5]),
    ("MEAN", ([[1, 2], [3, 4]], [[5, 6]]), (0, 1), 3.5),
    ("SUM", ([[1, 2], [3, 4]], [[5, 6]]), (0, 1), 21),
    ("SUM", ([[1, 2], [3, 4]], [[5, 6]]), (-2, -1), 21),
    ("MEAN", ([1, 2], [1, 2]), 0, 1.5),
    ("SUM", ([1, 2], [1, 2]), 0, 6),
]


@pytest.mark.parametrize(("op", "values", "axis", "want"), TABLE, ids=str)
def test_the_documented_table_holds_for_values_held_one_by_one(
    two: Strategy, op: str, values: tuple[Any, ...], axis: Any, want: Any
) -> None:
    got = two.reduce(op, _pr(*values), axis=axis)
    assert is_plain(got)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.asarray(want, np.float32))
    assert got.shape == np.shape(want)


@pytest.mark.parametrize(
    ("op", "values", "axis", "want"),
    [row for row in TABLE if np.shape(row[1][0]) == np.shape(row[1][1])],
    ids=str,
)
def test_the_documented_table_holds_for_values_on_the_devices(
    two: Strategy, op: str, values: tuple[Any, ...], axis: Any, want: Any
) -> None:
    on_devices = two.run(_identity, (_pr(*values),))
    assert on_devices.is_global
    got = two.reduce(op, on_devices, axis=axis)
    np.testing.assert_allclose(got, np.asarray(want, np.float32))
    assert got.shape == np.shape(want)


def test_mean_over_an_axis_counts_elements_and_not_replicas(two: Strategy) -> None:
    values = _pr([1, 2, 3], [10])
    assert float(two.reduce("MEAN", values, axis=0)) == 4.0
    mean_of_means = (2.0 + 10.0) / 2
    assert float(two.reduce("MEAN", values, axis=0)) != mean_of_means


# On every strategy, against NumPy


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1), (-1, 0)], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_is_what_numpy_gives_for_the_values_together(
    strategy: Strategy, op: str, axis: Any
) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(1).normal(size=(count, 3, 2)).astype(np.float32)
    over = (0,) if axis is None else (0, *(a % 2 + 1 for a in np.atleast_1d(axis)))
    want = (np.sum if op == "SUM" else np.mean)(rows, axis=over)
    held = per_replica(strategy, lambda r: rows[r])
    on_devices = split(strategy, rows.reshape(count * 3, 2))
    for value in (held, PerReplica.of_global(on_devices)):
        np.testing.assert_allclose(strategy.reduce(op, value, axis), want, rtol=1e-5)
    if count > 1:
        # A plain array in the per-replica layout is per-replica by its type.
        np.testing.assert_allclose(strategy.reduce(op, on_devices, axis), want, rtol=1e-5)


def test_values_too_large_for_the_host_are_reduced_on_the_devices_alike(
    strategy: Strategy,
) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(1).normal(size=(count, 1 << 15)).astype(np.float32)
    value = PerReplica.of_global(split(strategy, rows.reshape(-1)))
    for op, fn in (("SUM", np.sum), ("MEAN", np.mean)):
        np.testing.assert_allclose(
            strategy.reduce(op, value, None), fn(rows, axis=0), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(strategy.reduce(op, value, 0), fn(rows), rtol=1e-3, atol=1e-5)
    assert is_free(strategy.reduce("SUM", value, axis=None))


def test_ones_on_every_replica_sum_to_the_number_of_replicas(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    ones = per_replica(strategy, lambda r: 1.0)
    assert float(strategy.reduce(ReduceOp.SUM, ones, axis=None)) == count
    with strategy.scope():
        assert float(strategy.reduce(ReduceOp.SUM, ones, axis=None)) == count


def test_an_array_that_all_replicas_have_reduces_like_equal_copies(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    value = placed(strategy, np.array([1.0, 2.0], np.float32))
    np.testing.assert_allclose(strategy.reduce("SUM", value, axis=None), [count, 2 * count])
    np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=None), [1, 2])
    assert float(strategy.reduce("SUM", value, axis=0)) == 3.0 * count
    assert float(strategy.reduce("MEAN", value, axis=0)) == 1.5


def test_a_result_of_run_that_is_equal_everywhere_reduces_like_equal_copies(
    strategy: Strategy,
) -> None:
    same = strategy.run(lambda: jnp.asarray([1.0, 2.0]))
    count = strategy.num_replicas_in_sync
    np.testing.assert_allclose(strategy.reduce("SUM", same, axis=None), [count, 2 * count])
    np.testing.assert_allclose(strategy.reduce("MEAN", same, axis=None), [1, 2])


def test_the_sum_of_replica_ids_is_the_sum_of_numbers(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    ids = strategy.run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    assert int(strategy.reduce("sum", ids, axis=None)) == count * (count - 1) // 2
    mean = strategy.reduce("mean", ids, axis=None)
    if count > 1:
        assert mean.dtype == np.float32
        assert float(mean) == (count - 1) / 2


def test_structures_are_mapped_leaf_by_leaf_with_and_without_an_axis(two: Strategy) -> None:
    value = {"a": _pr(1, 2), "b": (_pr(3, 4),), "c": []}
    got = two.reduce("SUM", value, axis=None)
    assert jax.tree.map(float, got) == {"a": 3.0, "b": (7.0,), "c": []}
    mean = two.reduce("MEAN", (_pr(1, 2), _pr(3, 4)), axis=None)
    assert jax.tree.map(float, mean) == (1.5, 3.5)
    rows = {"a": _pr([1, 2, 3], [10]), "b": [_pr([1], [3])]}
    assert jax.tree.map(float, two.reduce("MEAN", rows, axis=0)) == {"a": 4.0, "b": [2.0]}


def test_the_result_is_tied_to_no_device(strategy: Strategy) -> None:
    values = per_replica(strategy, lambda r: np.ones((2, 2), np.float32) * r)
    on_devices = PerReplica.of_global(
        split(strategy, np.ones((strategy.num_replicas_in_sync * 2, 2), np.float32))
    )
    for value in (values, on_devices):
        for axis in (None, 0):
            assert is_free(strategy.reduce("SUM", value, axis=axis))


def test_reduce_inside_a_users_jit_is_the_same(strategy: Strategy) -> None:
    x = strategy.run(lambda x: x, (per_replica(strategy, lambda r: np.arange(2.0) + r),))
    if not isinstance(x, PerReplica):
        x = PerReplica.of_global(x)
    for op in ("SUM", "MEAN"):
        for axis in (None, 0):
            got = jax.jit(lambda v, op=op, axis=axis: strategy.reduce(op, v, axis))(x)
            np.testing.assert_allclose(got, strategy.reduce(op, x, axis), rtol=1e-6)


# Dtypes


@pytest.mark.parametrize("form", ["held", "on the devices", "uneven"])
@pytest.mark.parametrize(
    ("dtype", "sums_to", "mean_is"),
    [
        ("bool", "int32", "float32"),
        ("int8", "int8", "float32"),
        ("uint8", "uint8", "float32"),
        ("int32", "int32", "float32"),
        ("uint32", "uint32", "float32"),
        ("float16", "float16", "float16"),
        (BFLOAT16, "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("complex64", "complex64", "complex64"),
    ],
    ids=str,
)
def test_dtypes_of_sums_and_means(
    two: Strategy, form: str, dtype: Any, sums_to: str, mean_is: str
) -> None:
    rows = [np.array([1, 0], dtype), np.array([1] if form == "uneven" else [1, 1], dtype)]
    value = PerReplica(rows)
    if form == "on the devices":
        value = two.run(_identity, (value,))
    together = np.concatenate([r.astype(np.complex64) for r in rows])
    total, mean = two.reduce("SUM", value, axis=0), two.reduce("MEAN", value, axis=0)
    assert str(total.dtype) == sums_to
    assert str(mean.dtype) == mean_is
    np.testing.assert_allclose(np.asarray(total, np.complex64), together.sum())
    np.testing.assert_allclose(np.asarray(mean, np.complex64), together.mean(), rtol=4e-3)


def test_the_mean_of_integers_is_true_division(two: Strategy) -> None:
    got = two.reduce("MEAN", PerReplica([np.int32(1), np.int32(2)]), axis=None)
    assert (float(got), got.dtype) == (1.5, np.float32)
    rows = PerReplica([np.array([1, 2]), np.array([4])])
    np.testing.assert_allclose(two.reduce("MEAN", rows, axis=0), 7 / 3, rtol=1e-6)
    plain = two.reduce("MEAN", np.array([1, 2]), axis=0)
    assert (float(plain), plain.dtype) == (1.5, np.float32)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16], ids=str)
@pytest.mark.parametrize("form", ["held", "on the devices", "uneven"])
def test_means_of_half_precision_are_added_up_in_float32(
    two: Strategy, dtype: Any, form: str
) -> None:
    rows = [np.full(40_000, 3, dtype), np.full(30_000 if form == "uneven" else 40_000, 3, dtype)]
    value = PerReplica(rows)
    if form == "on the devices":
        value = two.run(_identity, (value,))
    assert float(two.reduce("MEAN", value, axis=0)) == 3.0


BY_OPS = {"default": None, "nccl": jaxdist.NcclAllReduce()}


@pytest.mark.parametrize("ops", BY_OPS)
def test_leaves_that_differ_between_replicas_are_all_named(ops: str) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=BY_OPS[ops])
    rows, halves = np.array([1, 2], np.int32), np.array([1, 2], np.float32)
    value = {
        "fits": PerReplica([rows, rows]),
        "dtypes": PerReplica([rows, halves]),
        "shapes": [PerReplica([halves, halves[:1]]), PerReplica([halves, halves])],
        "numbers": PerReplica([True, 2.5]),
    }
    dtypes = [
        "value['dtypes']: replicas [0]: int32[2], replicas [1]: float32[2]",
        "replicas [0]: bool[]",
    ]
    shapes = "value['shapes'][0]: replicas [0]: float32[2], replicas [1]: float32[1]"
    with refused(ShapeError, "Strategy.reduce(axis=None)", "3 values", *dtypes, shapes) as found:
        strategy.reduce("SUM", value, axis=None)
    assert "fits" not in str(found.value)
    assert "shapes'][1]" not in str(found.value)
    del value["numbers"]
    # Rows may differ where they are summed.
    with refused(ShapeError, "Strategy.reduce(axis=0)", dtypes[0], "astype") as found:
        strategy.reduce("MEAN", value, axis=0)
    assert "shapes" not in str(found.value)
    with refused(ShapeError, "value: replicas [0]: int32[2], replicas [1]: float32[2]"):
        strategy.extended.reduce_to("SUM", value["dtypes"], "cpu:0")


@pytest.mark.parametrize("ops", BY_OPS)
def test_sums_of_python_integers_are_exact_or_refused(ops: str) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=BY_OPS[ops])
    most, least = 2**31 - 1, -(2**31)
    assert int(strategy.reduce("SUM", PerReplica([most, least]), axis=None)) == -1
    assert int(strategy.reduce("SUM", PerReplica([[most - 1], [1]]), axis=0)) == most
    assert float(strategy.reduce("MEAN", PerReplica([most, most]), axis=None)) == 2.0**31
    for pair in ([most, 1], [[least, 0], [-1, 0]]):
        with refused(ReplicaValueError, "value['n']", str(sum(np.ravel(pair))), "int32", "x64"):
            strategy.reduce("SUM", {"n": PerReplica(pair)}, axis=None)
    for op in ReduceOp:
        for number in (2**31, least - 1, 2**70):
            # 64 bits do not hold the last one.
            remedy = () if number == 2**70 else ("x64",)
            with refused(
                ReplicaValueError, "value['n']", "replica 1", str(number), "int32", *remedy
            ):
                strategy.reduce(op, {"n": PerReplica([1, number])}, axis=None)


def test_python_integers_that_no_array_holds_are_refused_in_steps_and_gathers(
    two: Strategy,
) -> None:
    for number in (2**31, [0, -(2**40)]):
        value = PerReplica([1, number] if number == 2**31 else [[0, 0], number])
        with refused(ReplicaValueError, "args[0]", "replica 1", "int32"):
            two.run(_identity, (value,))
        with refused(ReplicaValueError, "value", "replica 1", "int32"):
            two.gather(PerReplica([[v] if v in (1, 2**31) else v for v in value.values]), axis=0)


# Values that are not distributed


@pytest.mark.parametrize(
    "value", [1.0, 3, np.float32(2), np.ones(2), 1j], ids=["float", "int", "scalar", "array", "1j"]
)
def test_the_sum_of_a_value_that_is_not_distributed_is_refused(two: Strategy, value: Any) -> None:
    with refused(
        ArgumentError, "is not distributed", "2 replicas", "Multiply by 2", "'MEAN'", "device_put"
    ):
        two.reduce("SUM", value, axis=None)


def test_the_sum_of_an_array_on_one_device_is_refused_even_of_zeros(two: Strategy) -> None:
    for value in (jnp.ones(2), jnp.zeros(2), jax.device_put(np.ones(2), jax.devices()[0])):
        with refused(ArgumentError, "is not distributed"):
            two.reduce("SUM", value, axis=None)


def test_a_leaf_that_is_not_distributed_is_named(two: Strategy) -> None:
    with refused(ArgumentError, "value['b'][1]", "a float that is not distributed"):
        two.reduce("SUM", {"a": _pr(1, 2), "b": [_pr(1, 2), 3.0]}, axis=None)


@pytest.mark.parametrize("value", [0, 0.0, np.float32(0), np.zeros(3)], ids=repr)
def test_zero_sums_to_itself(two: Strategy, value: Any) -> None:
    assert two.reduce("SUM", value, axis=None) is value
    mean = two.reduce("MEAN", value, axis=None)
    # The mean of an integer is a float.
    assert mean is value or type(value) is int
    np.testing.assert_array_equal(mean, value)


@pytest.mark.parametrize("value", [1.0, np.ones(2), jnp.ones(2)], ids=["1.0", "np", "jnp"])
def test_the_mean_of_a_value_that_is_not_distributed_is_itself(
    strategy: Strategy, value: Any
) -> None:
    assert strategy.reduce("MEAN", value, axis=None) is value


def test_the_mean_of_an_integer_that_is_not_distributed_is_the_float(strategy: Strategy) -> None:
    mean = strategy.reduce("MEAN", 3, axis=None)
    assert (mean.dtype, float(mean)) == (np.float32, 3.0)


def test_one_replica_gives_the_sum_of_a_plain_value_back() -> None:
    value = jnp.asarray([3.0, 4.0])
    for strategy in (
        jaxdist.get_strategy(),
        OneDeviceStrategy("cpu:1"),
        MirroredStrategy(["cpu:0"]),
    ):
        assert strategy.reduce("SUM", value, axis=None) is value
        assert strategy.reduce("SUM", 5, axis=None) == 5
        assert float(strategy.reduce("SUM", value, axis=0)) == 7.0
        assert float(strategy.reduce("MEAN", value, axis=0)) == 3.5


def test_with_an_axis_a_plain_value_is_taken_as_that_of_every_replica(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    for value in (np.array([1.0, 2.0]), jnp.asarray([1.0, 2.0])):
        assert float(strategy.reduce("SUM", value, axis=0)) == 3.0 * count
        assert float(strategy.reduce("MEAN", value, axis=0)) == 1.5


def test_axes_of_one_array_are_those_of_numpy() -> None:
    strategy, value = jaxdist.get_strategy(), np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=None), value)
    np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=0), [2, 3])
    assert float(strategy.reduce("MEAN", value, axis=(0, 1))) == 2.5
    np.testing.assert_allclose(strategy.reduce("SUM", value, axis=0), [4, 6])
    assert float(strategy.reduce("SUM", value, axis=(0, 1))) == 10.0


def test_a_python_constant_that_a_step_returned_is_not_distributed(two: Strategy) -> None:
    constant = two.run(lambda: 1.0)
    with refused(ArgumentError, "is not distributed"):
        two.reduce("SUM", constant, axis=None)


# Errors


class _Aggregation(enum.Enum):
    SUM = 1


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("op", ["max", "", None, 0, _Aggregation.SUM, jnp.sum], ids=_name)
def test_an_unknown_op_is_refused_with_the_valid_ones(two: Strategy, op: Any, axis: Any) -> None:
    with refused(
        ArgumentError,
        "Strategy.reduce",
        repr(op),
        "a jaxdist.ReduceOp",
        "'SUM'",
        "'MEAN'",
    ):
        two.reduce(op, _pr([1], [2]), axis=axis)


@pytest.mark.parametrize("op", ["sum", "Sum", "SUM", ReduceOp.SUM], ids=str)
def test_ops_are_taken_by_name_in_any_case(two: Strategy, op: Any) -> None:
    assert float(two.reduce(op, _pr(1, 2), axis=None)) == 3.0


def test_the_axis_has_no_default(two: Strategy) -> None:
    with pytest.raises(TypeError, match="axis"):
        two.reduce("SUM", _pr(1, 2))  # type: ignore[call-arg]


@pytest.mark.parametrize("form", ["held", "on the devices", "plain"])
@pytest.mark.parametrize(("axis", "rank"), [(2, 1), (-2, 1), (0, 0), ((0, 2), 2)], ids=str)
def test_an_axis_outside_the_rank_is_refused_with_the_valid_ones(
    two: Strategy, form: str, axis: Any, rank: int
) -> None:
    row = np.ones((2,) * rank, np.float32)
    value = {
        "held": PerReplica([row, row]),
        "on the devices": two.run(_identity, (PerReplica([row, row]),)),
        "plain": row,
    }[form]
    outside = axis[1] if isinstance(axis, tuple) else axis
    valid = str(list(range(-rank, rank))) if rank else "Pass axis=None"
    shape = f"float32{list(row.shape)} of rank {rank}"
    with refused(ShapeError, f"axis={outside}", "value['x']", shape, valid):
        two.reduce("SUM", {"x": value}, axis=axis)


@pytest.mark.parametrize("axis", [[0], "x", 0.0, True, (0, "x")], ids=repr)
def test_an_axis_that_is_no_integer_is_refused(two: Strategy, axis: Any) -> None:
    with refused(ArgumentTypeError, f"axis={axis!r}", "an integer, or a tuple of integers"):
        two.reduce("SUM", _pr([1], [2]), axis=axis)


def test_different_shapes_without_an_axis_are_refused_with_the_shapes(two: Strategy) -> None:
    with refused(
        ShapeError, "value['x']", "replicas [0]: float32[3]", "replicas [1]: float32[1]", "axis=0"
    ):
        two.reduce("SUM", {"x": _pr([1, 2, 3], [10])}, axis=None)


@pytest.mark.parametrize(
    "values", [([[1, 2]], [[1, 2, 3]]), ([[1, 2]], [1]), ([[1, 2]], [[[1]]])], ids=str
)
def test_different_shapes_off_the_axis_are_refused_with_the_shapes(
    two: Strategy, values: tuple[Any, Any]
) -> None:
    shapes = [f"replicas [{i}]: float32{list(np.shape(v))}" for i, v in enumerate(values)]
    with refused(ShapeError, "value['x']", *shapes, "axis=0"):
        two.reduce("SUM", {"x": _pr(*values)}, axis=0)


@pytest.mark.parametrize("value", ["text", b"bytes", np.array(["a"]), object()], ids=_kind)
def test_what_has_no_sum_is_named_and_refused(two: Strategy, value: Any) -> None:
    for given in (value, PerReplica([value, value])):
        with refused(ArgumentTypeError, "Strategy.reduce cannot reduce value['x']"):
            two.reduce("SUM", {"x": given}, axis=None)


def test_random_keys_have_no_sum(two: Strategy) -> None:
    keys = two.run(lambda k: k, (PerReplica([jax.random.key(0), jax.random.key(1)]),))
    with refused(ArgumentTypeError, "value['k']", "key<"):
        two.reduce("SUM", {"k": keys}, axis=None)


@pytest.mark.parametrize("count", [1, 3])
def test_a_value_with_the_wrong_number_of_components_is_named(two: Strategy, count: int) -> None:
    with refused(ReplicaValueError, "value['x']", f"{count} values", "2 replicas"):
        two.reduce("SUM", {"x": PerReplica(range(count))}, axis=None)


def test_a_value_of_another_strategy_is_named(two: Strategy) -> None:
    theirs = MirroredStrategy().run(lambda: jaxdist.get_replica_context().replica_id_in_sync_group)
    for axis in (None, 0):
        with refused(ReplicaValueError, "value['x'] is a PerReplica of another strategy"):
            two.reduce("SUM", {"x": theirs}, axis=axis)


def test_a_failed_reduce_leaves_the_value_as_it_was(two: Strategy) -> None:
    value = two.run(_identity, (_pr([1, 2], [3, 4]),))
    with pytest.raises(ShapeError):
        two.reduce("SUM", value, axis=5)
    with pytest.raises(ArgumentError):
        two.reduce("max", value, axis=None)
    np.testing.assert_allclose(two.reduce("SUM", value, axis=None), [4, 6])
