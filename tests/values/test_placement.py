"""The kind of a value, read from its sharding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxdist import MirroredStrategy, PerReplica, Strategy
from jaxdist._values import Kind, place_per_replica, placement_of, suggest_cast
from jaxdist.errors import ReplicaValueError, ShapeError
from tests.strategies.oracle import of_this_process, placed, refused, split


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, names)


@pytest.fixture
def logical() -> MirroredStrategy:
    return MirroredStrategy(mesh=_mesh((4, 2), ("data", "model")), replica_axes="data")


def test_arrays_over_the_mesh_keep_their_kind(strategy: Strategy) -> None:
    layout = strategy.layout
    rows = np.ones((strategy.num_replicas_in_sync * 2, 3))
    assert placement_of(placed(strategy, rows), layout).kind is Kind.MIRRORED
    want = Kind.PER_REPLICA if strategy.num_replicas_in_sync > 1 else Kind.MIRRORED
    assert placement_of(split(strategy, rows), layout).kind is want


@pytest.mark.parametrize(
    "value",
    [3.0, np.ones(8), jax.ShapeDtypeStruct((8,), "float32")],
    ids=["number", "numpy", "abstract"],
)
def test_everything_that_is_not_over_the_mesh_is_mirrored(strategy: Strategy, value: Any) -> None:
    found = placement_of(value, strategy.layout)
    assert found.kind is Kind.MIRRORED
    assert found.sharding == strategy.replicated_sharding


def test_an_array_on_one_device_or_over_another_mesh_is_mirrored(strategy: Strategy) -> None:
    here = jax.local_devices()
    if strategy.layout.devices == tuple(here[-2:]):
        pytest.skip("these devices make one mesh only")
    on_one = jax.device_put(np.ones(8), here[-1])
    other = MirroredStrategy(here[-2:])
    for value in (on_one, jnp.ones(8), placed(other, np.ones(8)), split(other, np.ones(8))):
        assert placement_of(value, strategy.layout).kind is Kind.MIRRORED


def test_a_per_replica_is_per_replica_whatever_it_holds(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    for value in (
        PerReplica([1.0] * count),
        PerReplica.of_global(np.ones(count)),
        PerReplica.of_global(split(strategy, np.ones(count))),
    ):
        assert placement_of(value, strategy.layout).kind is Kind.PER_REPLICA


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (P(), Kind.MIRRORED),
        (P(None, "model"), Kind.MIRRORED),
        (P("model"), Kind.MIRRORED),
        (P("data"), Kind.PER_REPLICA),
        (P("data", "model"), Kind.PER_REPLICA),
        (P(("data", "model")), Kind.PER_REPLICA),
    ],
    ids=str,
)
def test_the_logical_axes_do_not_decide_the_kind(
    logical: MirroredStrategy, spec: P, kind: Kind
) -> None:
    array = jax.device_put(np.ones((8, 8)), NamedSharding(logical.mesh, spec))
    found = placement_of(array, logical.layout)
    assert found.kind is kind
    assert found.sharding.is_equivalent_to(array.sharding, 2)


@pytest.mark.parametrize("spec", [P(None, "data"), P("model", "data")], ids=str)
def test_an_array_split_over_replicas_on_another_dim_is_one_array_for_all(
    logical: MirroredStrategy, spec: P
) -> None:
    rows = np.arange(64.0).reshape(8, 8)
    array = jax.device_put(rows, NamedSharding(logical.mesh, spec))
    assert placement_of(array, logical.layout).kind is Kind.MIRRORED
    assert float(logical.run(lambda x: x.sum(), (array,))) == rows.sum()


@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(("data", "model"))], ids=str)
def test_a_step_on_rows_split_over_logical_devices_too_sees_its_replicas_rows(
    logical: MirroredStrategy, spec: P
) -> None:
    rows = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    array = jax.device_put(rows, NamedSharding(logical.mesh, spec))
    got = logical.run(lambda x: x.sum(1), (array,))
    assert isinstance(got, PerReplica)
    for have, want in zip(got.values, np.split(rows.sum(1), 4), strict=True):
        np.testing.assert_allclose(have, want)
    assert logical.gather(array, axis=0).tolist() == rows.tolist()
    np.testing.assert_allclose(logical.reduce("SUM", array, axis=None), sum(np.split(rows, 4)))


def test_a_single_device_array_is_mirrored_where_the_mesh_is_that_device() -> None:
    strategy = MirroredStrategy(["cpu:3"])
    here = jax.device_put(np.ones(2), SingleDeviceSharding(jax.devices()[3]))
    assert placement_of(here, strategy.layout).kind is Kind.MIRRORED


# Placing values on the devices


def test_values_are_put_on_the_devices_of_their_replicas(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    value = PerReplica([np.full((2,), r) for r in range(count)])
    on = place_per_replica("x", value, strategy.layout)
    assert on.is_global
    assert on.array.sharding == strategy.per_replica_sharding
    listed = of_this_process(strategy, [[r, r] for r in range(count)])
    assert [v.tolist() for v in on.values] == listed


def test_a_value_that_is_in_place_is_not_touched(strategy: Strategy) -> None:
    value = PerReplica.of_global(split(strategy, np.ones(strategy.num_replicas_in_sync)))
    assert place_per_replica("x", value, strategy.layout) is value


def test_a_global_array_whose_rows_do_not_divide_is_refused_with_the_number() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    for value in (PerReplica.of_global(np.ones((7, 2), np.float32)),):
        with refused(ShapeError, "args[0]", "float32[7, 2]", "3 replicas", "multiple of 3"):
            strategy.run(lambda x: x, (value,))
        for call in (
            lambda v=value: strategy.reduce("SUM", {"x": v}, axis=0),
            lambda v=value: strategy.gather({"x": v}, axis=0),
        ):
            with refused(ShapeError, "value['x']", "float32[7, 2]", "multiple of 3"):
                call()


def test_values_that_differ_in_dtype_are_refused_with_both() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    value = PerReplica([np.ones(2, np.float32), np.ones(2, np.int32)])
    with refused(ShapeError, "args[0]", "replica 0: float32[2]", "replica 1: int32[2]"):
        strategy.run(lambda x: x, (value,))


def test_lists_of_numbers_are_arrays_and_other_objects_are_refused() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    got = strategy.run(lambda x: x.sum(), (PerReplica([[1.0, 2.0], [3.0, 4.0]]),))
    assert [float(v) for v in got.values] == [3.0, 7.0]
    for odd in (None, object(), "text"):
        with refused(ReplicaValueError, "args[0]", "replica 1", type(odd).__name__):
            strategy.run(lambda x: x, (PerReplica([1.0, odd]),))


DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("pair", list(itertools.combinations(DTYPES, 2)), ids=str)
def test_the_dtype_is_that_of_a_sum_of_both(pair: tuple[str, str]) -> None:
    dtypes = [jnp.dtype(name) for name in pair]
    with jax.enable_x64(False):
        a, b = (jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)) for dtype in dtypes)
        expected = "bool" if pair == ("bool", "bool") else (a + b).dtype.name
        assert f"x.astype({expected!r})" in suggest_cast("x", dtypes)


@pytest.mark.parametrize("other", [np.dtype("<U3"), np.dtype("M8[s]"), np.dtype(object)], ids=str)
def test_dtypes_that_have_none_in_common_are_told_to_be_made_equal(other: np.dtype) -> None:
    assert suggest_cast("x", [np.dtype("float32"), other]).startswith("Give every replica")
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    assert suggest_cast("x", [np.dtype("float32"), key]).startswith("Give every replica")
