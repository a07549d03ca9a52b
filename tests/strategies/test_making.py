"""Making strategies: devices by every documented name, meshes, copies, and what is refused."""

import copy
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import MirroredStrategy, OneDeviceStrategy, PerReplica, Strategy, TPUStrategy
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, DeviceError
from tests.strategies.oracle import assert_each, is_plain, refused
from tests.strategies_under_test import STRATEGIES, Row


def _id() -> jax.Array:
    return jaxdist.get_replica_context().replica_id_in_sync_group


# Facts


@pytest.mark.a_device_for_each
def test_a_strategy_says_how_many_replicas_it_has(strategy_row: Row) -> None:
    strategy = strategy_row.make()
    assert strategy.num_replicas_in_sync == strategy_row.num_replicas
    size = strategy_row.num_replicas * strategy_row.num_logical
    assert strategy.mesh.devices.size == size
    assert isinstance(strategy, Strategy)


def test_every_kind_of_strategy_is_in_the_table_of_strategies() -> None:
    def concrete(kind: type) -> set[type]:
        below = kind.__subclasses__()
        return set(below).union(*map(concrete, below)) if below else {kind}

    # Those of version 1 run as the others, on the same layouts (`test_v1.py`).
    # Those with parameter servers have tests of their own (`tests/parameter_server/strategy`).
    others = ("jaxdist.compat", "jaxdist._parameter_server")
    kinds = {k for k in concrete(Strategy) if not k.__module__.startswith(others)}
    assert {type(row.make()) for row in STRATEGIES} >= kinds


def test_only_strategies_that_were_made_from_a_resolver_have_one(strategy: Strategy) -> None:
    has_one = isinstance(strategy, (TPUStrategy, jaxdist.MultiWorkerMirroredStrategy))
    assert (strategy.cluster_resolver is None) != has_one


def test_the_axes_of_the_mesh_are_auto(strategy: Strategy) -> None:
    assert set(strategy.mesh.axis_types) == {AxisType.Auto}
    assert set(strategy.replica_axes) <= set(strategy.mesh.axis_names)


@pytest.mark.a_device_for_each
def test_the_two_layouts_are_what_their_names_say(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    whole = jax.device_put(np.arange(count * 2), strategy.replicated_sharding)
    assert whole.is_fully_replicated
    rows = jax.device_put(np.arange(count * 2), strategy.per_replica_sharding)
    for shard in rows.addressable_shards:
        where = np.argwhere(strategy.layout.device_grid == shard.device)
        replica = int(where[0][0])
        assert np.asarray(shard.data).tolist() == [2 * replica, 2 * replica + 1]


def test_the_repr_names_the_class_and_the_replicas(strategy: Strategy) -> None:
    assert repr(strategy).startswith(type(strategy).__name__)
    kind = "replicas" if strategy.layout.num_virtual is None else "virtual replicas"
    assert f"{strategy.num_replicas_in_sync} {kind}" in repr(strategy)


def test_the_base_class_is_not_made_directly() -> None:
    with refused(ArgumentTypeError, "Strategy is not made directly", "MirroredStrategy"):
        Strategy()
    with pytest.raises(TypeError):
        Strategy(object())


def test_the_default_strategy_is_one_object() -> None:
    assert jaxdist.get_strategy() is jaxdist.get_strategy()


def test_constructors_have_the_documented_parameters() -> None:
    mirrored = list(inspect.signature(MirroredStrategy).parameters.values())
    assert [p.name for p in mirrored[:2]] == ["devices", "cross_device_ops"]
    assert mirrored[0].default is None
    assert mirrored[1].default is None
    one = list(inspect.signature(OneDeviceStrategy).parameters.values())
    assert [p.name for p in one if p.kind is not p.KEYWORD_ONLY] == ["device"]
    assert one[0].default is inspect.Parameter.empty


def test_methods_have_the_documented_parameters() -> None:
    def names(fn: Any, count: int) -> list[str]:
        return list(inspect.signature(fn).parameters)[1 : count + 1]

    assert names(Strategy.run, 4) == ["fn", "args", "kwargs", "options"]
    assert names(Strategy.reduce, 3) == ["reduce_op", "value", "axis"]
    assert names(Strategy.gather, 2) == ["value", "axis"]
    assert names(Strategy.experimental_local_results, 1) == ["value"]
    assert names(Strategy.experimental_distribute_values_from_function, 1) == ["value_fn"]
    context = jaxdist.ReplicaContext
    assert names(context.all_reduce, 3) == ["reduce_op", "value", "options"]
    assert names(context.all_gather, 3) == ["value", "axis", "options"]
    assert names(context.merge_call, 3) == ["merge_fn", "args", "kwargs"]
    extended = jaxdist.StrategyExtended
    assert names(extended.reduce_to, 4) == ["reduce_op", "value", "destinations", "options"]
    assert names(extended.batch_reduce_to, 3) == [
        "reduce_op",
        "value_destination_pairs",
        "options",
    ]
    assert names(extended.broadcast_to, 2) == ["tensor", "destinations"]
    assert names(extended.call_for_each_replica, 3) == ["fn", "args", "kwargs"]


# Devices


@pytest.mark.parametrize("devices", [None, []], ids=repr)
def test_no_devices_means_all_of_this_process(devices: Any) -> None:
    assert MirroredStrategy(devices).layout.devices == tuple(jax.devices())


def test_devices_are_taken_by_every_documented_name_in_the_order_given() -> None:
    names = [
        "CPU:1",
        "cpu:0",
        "/device:CPU:3",
        "/job:localhost/replica:0/task:0/device:CPU:2",
        jax.devices()[5],
    ]
    strategy = MirroredStrategy(names)
    assert [d.id for d in strategy.layout.devices] == [1, 0, 3, 2, 5]
    ids = strategy.run(_id)
    assert [next(iter(v.devices())).id for v in ids.values] == [1, 0, 3, 2, 5]


def test_one_device_given_alone_is_a_strategy_of_one_replica() -> None:
    for device in ("cpu:3", jax.devices()[3]):
        assert MirroredStrategy(device).layout.devices == (jax.devices()[3],)
        assert OneDeviceStrategy(device).layout.devices == (jax.devices()[3],)


def test_a_device_that_does_not_exist_is_refused_with_those_that_do() -> None:
    for make in (
        lambda: MirroredStrategy(["cpu:0", "cpu:99"]),
        lambda: OneDeviceStrategy("cpu:99"),
    ):
        with refused(
            DeviceError,
            "'cpu:99' does not exist",
            "8 CPU device(s)",
            "'cpu:0'",
            "'cpu:7'",
            "virtual_devices(100)",
        ):
            make()


def test_an_accelerator_that_is_not_there_is_refused() -> None:
    with refused(DeviceError, "'TPU:0' does not exist", "0 TPU device(s)", "'cpu:0'"):
        MirroredStrategy(["TPU:0"])


@pytest.mark.parametrize("twice", [["cpu:0", "cpu:0"], ["cpu:1", "/device:CPU:1", "cpu:0"]])
def test_a_device_that_is_listed_twice_is_refused_by_name(twice: list[str]) -> None:
    with refused(DeviceError, "same device twice", "List each device once", *twice[:2]):
        MirroredStrategy(twice)


@pytest.mark.parametrize("ops", ["nccl", 3, jaxdist.NcclAllReduce], ids=["str", "int", "class"])
def test_what_is_no_cross_device_ops_is_refused(ops: Any) -> None:
    with refused(ArgumentTypeError, "cross_device_ops=", "NcclAllReduce(num_packs=2)"):
        MirroredStrategy(cross_device_ops=ops)


def test_deterministic_sums_are_not_by_other_ops() -> None:
    with refused(ArgumentError, "NcclAllReduce", "deterministic=True", "Leave one of them out"):
        MirroredStrategy(cross_device_ops=jaxdist.NcclAllReduce(), deterministic=True)


# Meshes of the user's own


def _mesh(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    if kind == "make_mesh":
        return jax.make_mesh(shape, names)
    types = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
    if kind in types:
        return jax.make_mesh(shape, names, axis_types=(types[kind],) * len(names))
    devices = np.asarray(jax.devices()[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, names)


KINDS = ["make_mesh", "explicit", "auto", "Mesh"]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_laid_out_over_a_users_own_mesh_keep_their_meaning(kind: str) -> None:
    mesh = _mesh(kind, (4, 2), ("data", "model"))
    strategy = MirroredStrategy(mesh=mesh, replica_axes=("data",))
    assert strategy.num_replicas_in_sync == 4
    assert strategy.replica_axes == ("data",)
    batch = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    weights = jax.device_put(np.arange(2.0), NamedSharding(mesh, PartitionSpec()))
    split_weights = jax.device_put(np.arange(2.0), NamedSharding(mesh, PartitionSpec("model")))

    def step(w: Any, s: Any, x: Any) -> Any:
        assert w.shape == s.shape == x.shape == (2,)
        total = jaxdist.get_replica_context().all_reduce("sum", x.sum())
        return w + s + total, x * 2

    for _ in range(2):
        new, local = strategy.run(step, (weights, split_weights, batch))
        assert is_plain(new)
        np.testing.assert_allclose(new, [28, 30])
        assert_each(strategy, local, [[0, 2], [4, 6], [8, 10], [12, 14]])
    assert float(strategy.reduce("SUM", batch, axis=0)) == 28.0
    assert strategy.gather(batch, axis=0).tolist() == list(range(8))
    assert len(strategy.experimental_local_results(weights)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_results_over_a_users_own_mesh_combine_with_arrays_of_the_strategy(kind: str) -> None:
    mesh = _mesh(kind, (8,), ("data",))
    strategy = MirroredStrategy(mesh=mesh, replica_axes="data")
    state = np.zeros(2, np.float32)
    for _ in range(4):
        state = strategy.run(_plus_one, (state,))
    np.testing.assert_allclose(state, [4, 4])
    assert (state + jax.device_put(np.ones(2), strategy.replicated_sharding)).tolist() == [5, 5]


def _plus_one(w: Any) -> Any:
    return w + 1


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), ("a",), ("b",)], ids=str)
def test_replicas_are_counted_over_the_axes_in_the_order_given(axes: tuple[str, ...]) -> None:
    mesh = _mesh("Mesh", (2, 4), ("a", "b"))
    strategy = MirroredStrategy(mesh=mesh, replica_axes=axes)
    grid = mesh.devices if axes[0] == "a" else mesh.devices.T
    order = [d.id for d in (grid.ravel() if len(axes) == 2 else grid[:, 0])]
    ids = strategy.run(_id)
    for r, (value, device) in enumerate(zip(ids.values, order, strict=True)):
        assert int(value) == r
        assert min(d.id for d in value.devices()) == device
    assert [d.id for d in strategy.layout.device_grid[:, 0]] == order
    x = PerReplica([np.full(2, r) for r in range(len(order))])
    assert (
        strategy.gather(strategy.run(_same, (x,)), axis=0).tolist()
        == np.repeat(np.arange(len(order)), 2).tolist()
    )


def _same(x: Any) -> Any:
    return x


def test_collectives_of_jax_work_over_the_replica_axes(strategy: Strategy) -> None:
    count = strategy.num_replicas_in_sync
    got = strategy.run(lambda: jax.lax.psum(_id(), strategy.replica_axes))
    assert is_plain(got)
    assert int(got) == count * (count - 1) // 2


@pytest.mark.parametrize(
    ("given", "error", "parts"),
    [
        ({}, ArgumentError, ["no replica_axes", "('data', 'model')", "('data',)"]),
        ({"replica_axes": ("rows",)}, ArgumentError, ["['rows']", "('data', 'model')"]),
        ({"replica_axes": ()}, ArgumentError, ["empty", "('data', 'model')"]),
        ({"replica_axes": ("data", "data")}, ArgumentError, ["repeats a name"]),
        ({"replica_axes": "data", "devices": ["cpu:0"]}, ArgumentError, ["both devices and mesh"]),
    ],
    ids=["none", "unknown", "empty", "repeated", "devices"],
)
def test_replica_axes_that_do_not_fit_the_mesh_are_refused(
    given: dict[str, Any], error: Any, parts: list[str]
) -> None:
    with refused(error, *parts):
        MirroredStrategy(mesh=_mesh("Mesh", (4, 2), ("data", "model")), **given)


def test_replica_axes_without_a_mesh_are_refused() -> None:
    with refused(ArgumentError, "replica_axes=('data',) without a mesh"):
        MirroredStrategy(replica_axes=("data",))


def test_what_is_no_mesh_is_refused() -> None:
    with refused(ArgumentTypeError, "mesh is a jax.sharding.Mesh", "mesh=[1], of type list"):
        MirroredStrategy(mesh=[1], replica_axes="data")  # type: ignore[arg-type]


# Copies


def test_a_shallow_copy_is_refused(strategy: Strategy) -> None:
    # The default strategy is copied in no way.
    instead = "get_strategy()" if type(strategy).__name__ == "DefaultStrategy" else "copy.deepcopy"
    with refused(ContextError, f"{type(strategy).__name__}.", "copy.copy was called", instead):
        copy.copy(strategy)


def test_a_strategy_and_what_belongs_to_it_are_not_pickled(strategy: Strategy) -> None:
    name = type(strategy).__name__
    with refused(ContextError, f"A {name} was pickled", "Make the strategy again"):
        pickle.dumps(strategy)
    with strategy.scope():
        variable = jaxdist.Variable(1.0)
    # Variables of the default strategy belong to no strategy.
    if name != "DefaultStrategy":
        with refused(ContextError, f"a Variable of a {name}", "Pickle np.asarray(variable)"):
            pickle.dumps({"v": variable})
    assert pickle.loads(pickle.dumps(np.asarray(variable))) == 1


def test_a_deep_copy_is_another_strategy_on_the_same_devices(strategy_row: Row) -> None:
    strategy = strategy_row.make()
    if strategy is jaxdist.get_strategy():
        with refused(ContextError, "default strategy is one object"):
            copy.deepcopy(strategy)
        return
    other = copy.deepcopy(strategy)
    assert other is not strategy
    assert type(other) is type(strategy)
    assert other.layout.devices == strategy.layout.devices
    got = other.run(lambda x: x + 1, (jnp.ones(2),))
    np.testing.assert_allclose(got, [2, 2])
    with strategy.scope(), refused(jaxdist.errors.MixedStrategyError), other.scope():
        pass


def test_a_deep_copy_takes_the_values_of_the_first() -> None:
    strategy = MirroredStrategy()
    other = copy.deepcopy({"strategy": strategy})["strategy"]
    ids = strategy.run(_id)
    assert_each(other, other.run(_plus_one, (ids,)), list(range(1, 9)))
