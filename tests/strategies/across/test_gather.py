"""`Strategy.gather`: the values of all replicas, one after the other."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, Strategy
from jaxdist.errors import ContextError, ReplicaValueError, ShapeError
from tests.strategies.oracle import is_free, is_plain, per_replica, placed, refused, split


@pytest.fixture
def two() -> MirroredStrategy:
    return MirroredStrategy(["cpu:0", "cpu:1"])


def _identity(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("values", "axis", "want"),
    [
        (([[1]], [[2], [3]]), 0, [[1], [2], [3]]),
        (([[1]], [[2, 3]]), 1, [[1, 2, 3]]),
        (([[1]], [[2, 3]]), -1, [[1, 2, 3]]),
        (([1, 2], [3]), 0, [1, 2, 3]),
        (([], [2, 3]), 0, [2, 3]),
        (([[[1], [2]]], [[[3], [4]]]), 1, [[[1], [2], [3], [4]]]),
        (([[[1], [2]]], [[[3], [4]]]), 2, [[[1, 3], [2, 4]]]),
    ],
    ids=str,
)
def test_the_documented_table_holds(
    two: Strategy, values: tuple[Any, ...], axis: int, want: Any
) -> None:
    value = PerReplica([np.asarray(v, np.float32) for v in values])
    got = two.gather(value, axis=axis)
    assert is_plain(got)
    np.testing.assert_array_equal(got, np.asarray(want, np.float32))
    if np.shape(values[0]) == np.shape(values[1]):
        np.testing.assert_array_equal(two.gather(two.run(_identity, (value,)), axis), want)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_gather_is_numpys_concatenation_in_replica_order(strategy: Strategy, axis: int) -> None:
    count = strategy.num_replicas_in_sync
    rows = np.random.default_rng(2).normal(size=(count, 2, 3, 2)).astype(np.float32)
    want = np.concatenate(list(rows), axis=axis)
    held = per_replica(strategy, lambda r: rows[r])
    on_devices = split(strategy, rows.reshape(count * 2, 3, 2))
    for value in (held, PerReplica.of_global(on_devices)):
        np.testing.assert_array_equal(strategy.gather(value, axis=axis), want)
    if count > 1:
        np.testing.assert_array_equal(strategy.gather(on_devices, axis=axis), want)


def test_uneven_values_are_gathered_on_the_dim_that_differs(strategy: Strategy) -> None:
    value = per_replica(strategy, lambda r: np.full((r + 1, 2), r))
    want = np.concatenate([np.full((r + 1, 2), r) for r in range(strategy.num_replicas_in_sync)])
    np.testing.assert_array_equal(strategy.gather(value, axis=0), want)


def test_a_mirrored_array_is_gathered_as_the_copy_of_every_replica(strategy: Strategy) -> None:
    value = placed(strategy, np.array([1, 2]))
    want = [1, 2] * strategy.num_replicas_in_sync
    assert strategy.gather(value, axis=0).tolist() == want
    same = strategy.run(lambda: jnp.asarray([1, 2]))
    assert strategy.gather(same, axis=0).tolist() == want


@pytest.mark.parametrize(
    "value",
    [1.5, 3, "text", None, np.ones(2), jnp.ones((2, 2))],
    ids=["float", "int", "str", "None", "np", "jnp"],
)
def test_a_value_that_is_not_distributed_comes_back_unchanged(
    strategy: Strategy, value: Any
) -> None:
    assert strategy.gather(value, axis=0) is value
    assert strategy.gather({"a": value}, axis=0)["a"] is value


def test_structures_are_mapped_leaf_by_leaf(two: Strategy) -> None:
    x = PerReplica([np.array([1]), np.array([2, 3])])
    got = two.gather({"a": x, "b": [x, 5]}, axis=0)
    assert got["a"].tolist() == got["b"][0].tolist() == [1, 2, 3]
    assert got["b"][1] == 5


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint16", "int32", "float16", ml_dtypes.bfloat16, "float32", "complex64"],
    ids=str,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_dtype_is_gathered_as_it_is(two: Strategy, dtype: Any, axis: int) -> None:
    rows = [np.array([[0, 1]], dtype), np.array([[1, 1]], dtype)]
    want = np.concatenate(rows, axis)
    for value in (PerReplica(rows), two.run(_identity, (PerReplica(rows),))):
        got = two.gather(value, axis=axis)
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(got), want)


def test_random_keys_are_gathered(two: Strategy) -> None:
    keys = [jax.random.split(jax.random.key(i), 2) for i in range(2)]
    want = np.concatenate([jax.random.key_data(k) for k in keys])
    for value in (PerReplica(keys), two.run(_identity, (PerReplica(keys),))):
        got = two.gather(value, axis=0)
        np.testing.assert_array_equal(jax.random.key_data(got), want)


def test_the_result_is_tied_to_no_device(strategy: Strategy) -> None:
    held = per_replica(strategy, lambda r: np.ones(2, np.float32))
    on_devices = PerReplica.of_global(
        split(strategy, np.ones(strategy.num_replicas_in_sync * 2, np.float32))
    )
    for value in (held, on_devices):
        assert is_free(strategy.gather(value, axis=0))


def test_gather_inside_a_users_jit_is_the_same(two: Strategy) -> None:
    x = two.run(_identity, (PerReplica([np.array([[1, 2]]), np.array([[3, 4]])]),))
    for axis in (0, 1):
        got = jax.jit(lambda v, axis=axis: two.gather(v, axis))(x)
        np.testing.assert_array_equal(got, two.gather(x, axis))


def test_the_default_strategy_gives_values_back_as_they_are() -> None:
    value = jnp.ones(2)
    assert jaxdist.get_strategy().gather(value, axis=0) is value


# Errors


def test_scalars_are_refused_with_the_remedy(two: Strategy) -> None:
    held = PerReplica([np.float32(1), np.float32(2)])
    for value in (held, two.run(_identity, (held,)), PerReplica([1.0, 2.0])):
        with refused(ShapeError, "Strategy.gather", "value['x']", "is a scalar", "value[None]"):
            two.gather({"x": value}, axis=0)


@pytest.mark.parametrize("axis", [2, -3])
@pytest.mark.parametrize("form", ["held", "on the devices", "mirrored"])
def test_an_axis_outside_the_rank_is_refused_with_the_valid_ones(
    two: Strategy, axis: int, form: str
) -> None:
    row = np.ones((1, 2), np.float32)
    value = {
        "held": PerReplica([row, row]),
        "on the devices": two.run(_identity, (PerReplica([row, row]),)),
        "mirrored": placed(two, row),
    }[form]
    with refused(
        ShapeError, f"axis={axis}", "value['x']", "float32[1, 2] of rank 2", "[-2, -1, 0, 1]"
    ):
        two.gather({"x": value}, axis=axis)


@pytest.mark.parametrize("axis", [None, "0", 0.0, True, (0, 1)], ids=repr)
def test_an_axis_that_is_no_integer_is_refused(two: Strategy, axis: Any) -> None:
    with refused(ShapeError, f"axis={axis!r}", "one integer"):
        two.gather(PerReplica([np.ones(1), np.ones(1)]), axis=axis)


def test_shapes_that_differ_off_the_axis_are_refused_with_the_shapes(two: Strategy) -> None:
    value = PerReplica([np.ones((1, 2)), np.ones((1, 3))])
    with refused(
        ShapeError,
        "Strategy.gather(axis=0)",
        "value['x']: replicas [0]: float32[1, 2], replicas [1]: float32[1, 3]",
        "but for dim 0",
        "pad",
    ):
        two.gather({"x": value}, axis=0)


@pytest.mark.parametrize("axis", [0, -1])
def test_ranks_that_differ_are_refused_with_the_shapes(two: Strategy, axis: int) -> None:
    value = PerReplica([np.ones((1, 1)), np.ones((1,))])
    with refused(ShapeError, "replicas [0]: float32[1, 1]", "replicas [1]: float32[1]"):
        two.gather(value, axis=axis)


@pytest.mark.parametrize("count", [1, 3])
def test_a_value_with_the_wrong_number_of_components_is_named(two: Strategy, count: int) -> None:
    with refused(ReplicaValueError, "value['x']", f"{count} values", "2 replicas"):
        two.gather({"x": PerReplica([np.ones(1)] * count)}, axis=0)


def test_a_value_of_another_strategy_is_named(two: Strategy) -> None:
    theirs = MirroredStrategy().run(
        lambda: jaxdist.get_replica_context().replica_id_in_sync_group[None]
    )
    for strategy in (two, OneDeviceStrategy("cpu:0")):
        with refused(ReplicaValueError, "value['x'] is a PerReplica of another strategy"):
            strategy.gather({"x": theirs}, axis=0)


def test_a_shape_mismatch_leaves_later_gathers_as_they_were(two: Strategy) -> None:
    with pytest.raises(ShapeError):
        two.gather(PerReplica([np.ones((1, 2)), np.ones((1, 3))]), axis=0)
    for strategy in (two, MirroredStrategy()):
        value = per_replica(strategy, lambda r: np.array([r]))
        want = list(range(strategy.num_replicas_in_sync))
        assert strategy.gather(value, axis=0).tolist() == want


def test_strings_cannot_be_gathered(two: Strategy) -> None:
    with refused(jaxdist.errors.ArgumentTypeError, "value['x']"):
        two.gather({"x": PerReplica([np.array(["a"]), np.array(["b"])])}, axis=0)


def test_a_per_replica_whose_rows_lie_whole_on_every_device_is_read_once(
    strategy: Strategy,
) -> None:
    """Reading shards one after the other would count every copy."""
    count = strategy.num_replicas_in_sync
    rows = np.arange(2 * count)
    value = PerReplica.of_global(placed(strategy, rows))
    assert strategy.gather(value, axis=0).tolist() == rows.tolist()
    want = rows.reshape(count, 2).sum(0)
    assert strategy.reduce("SUM", value, axis=None).tolist() == want.tolist()


def test_a_small_gather_is_few_calls() -> None:
    """What a call costs above reading the array is Python, so it is counted."""
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    held = strategy.run(_identity, (PerReplica([np.ones((2, 4), np.float32)] * 2),))
    strategy.gather(held, axis=0)
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        strategy.gather(held, axis=0)
    finally:
        sys.setprofile(None)
    assert len(calls) < 80, calls


# JAX does not tell whether a traced array is one value of every replica, which is repeated, or has
# the rows of all: outside of the function both are known.
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("value", ["argument", "result of a step", "result of an operation"])
def test_a_traced_array_that_may_be_of_every_replica_is_an_error(
    value: str, axis_type: str
) -> None:
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
    x = jax.device_put(np.ones((4, 2), np.float32), jax.NamedSharding(mesh, jax.P()))

    def gather(x: jax.Array) -> Any:
        made = {
            "argument": lambda: x,
            "result of a step": lambda: strategy.run(_identity, (x,)),
            "result of an operation": lambda: x + 1,
        }
        return strategy.gather({"a": made[value]()}, axis=0)

    words = ("['a']", "float32[4,2]", "PerReplica.of_global(x)", "PerReplica([x] * 4)")
    with jax.set_mesh(mesh), refused(ContextError, *words):
        jax.jit(gather)(x)
    with refused(ContextError, *words):
        jaxdist.function(gather)(x) if value == "result of an operation" else jax.jit(gather)(x)
    assert strategy.gather(x, axis=0).shape == (16, 2)
    assert OneDeviceStrategy("cpu:0").gather(jnp.ones(2), axis=0).shape == (2,)


def test_what_the_error_of_a_traced_array_says_gives_what_gather_gives_outside() -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)])
    x = split(strategy, np.arange(8, dtype=np.float32).reshape(4, 2))
    rows = jax.jit(lambda x: strategy.gather(PerReplica.of_global(x), axis=0))(x)
    np.testing.assert_array_equal(rows, strategy.gather(x, axis=0))
    whole = strategy.run(lambda v: jax.lax.pmean(v, strategy.replica_axes), (x,))
    repeated = jax.jit(lambda x: strategy.gather(PerReplica([x] * 4), axis=0))(whole)
    np.testing.assert_array_equal(repeated, strategy.gather(whole, axis=0))
    np.testing.assert_array_equal(
        jaxdist.function(lambda x: strategy.gather(x, 0))(whole), repeated
    )
