"""`CrossDeviceOps`: in steps, in `reduce`, and on their own."""

import dataclasses
from collections import Counter, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    NcclAllReduce,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    get_replica_context,
)
from jaxdist.contrib import AllReduceCrossDeviceOps, MultiWorkerAllReduce
from jaxdist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    ReplicaValueError,
    ShapeError,
)
from jaxdist.experimental import CollectiveAllReduce, CommunicationOptions
from tests.strategies.oracle import refused
from tests.strategies_under_test import STRATEGIES, Row
from tests.tables import sampled

TWO_WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]


def _workers(spec: Any, **more: Any) -> MultiWorkerAllReduce:
    return MultiWorkerAllReduce(TWO_WORKERS, 2, spec, **more)


OPS = {
    "collective": CollectiveAllReduce(),
    "one_device": ReductionToOneDevice(),
    "one_device_not_the_first": ReductionToOneDevice("cpu:2"),
    "one_device_own_sum": ReductionToOneDevice(accumulation_fn=sum),
    "nccl": NcclAllReduce(),
    "nccl_2_packs": NcclAllReduce(num_packs=2),
    "hierarchical": HierarchicalCopyAllReduce(),
    "hierarchical_0_packs": HierarchicalCopyAllReduce(num_packs=0),
    "all_reduce_8_packs": AllReduceCrossDeviceOps(num_packs=8),
    "all_reduce_hierarchical": AllReduceCrossDeviceOps("hierarchical_copy", num_packs=3),
    "all_reduce_small": AllReduceCrossDeviceOps(
        num_packs=0, agg_small_grads_max_bytes=64, agg_small_grads_max_group=2
    ),
    "workers_default": MultiWorkerAllReduce(TWO_WORKERS, 2),
    "workers_by_size": _workers([("nccl", 1, 16), ("xring", 2, 64), ("nccl/rechd", 3, -1)]),
    "workers_packed": _workers("psgpu", num_packs=2),
}


def _leaves(x: Any) -> dict[str, Any]:
    return {"a": x, "b": [x[:1], (x * 3).astype(jnp.int32)], "c": x.sum(), "d": x > 2, "e": x[:0]}


def _expected(op: str, rows: np.ndarray) -> dict[str, Any]:
    count = len(rows) if op == "MEAN" else 1
    return {
        "a": rows.sum(0) / count,
        "b": [rows[:, :1].sum(0) / count, (rows * 3).astype(np.int32).sum(0) / count],
        "c": rows.sum() / count,
        "d": (rows > 2).sum(0) / count,
        "e": np.zeros(0),
    }


def _same(found: Any, expected: Any) -> None:
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5), found, expected)


ROWS = np.arange(20, dtype=np.float32).reshape(4, 5) / 2


@pytest.fixture
def rows() -> PerReplica:
    return PerReplica(list(ROWS))


BOTH = ("SUM", "MEAN")


@pytest.mark.both_executors
@pytest.mark.parametrize("name", sampled(list(OPS), 8))
def test_a_step_reduces_by_the_ops_of_its_strategy(name: str, rows: PerReplica) -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], OPS[name])

    def step(x: Any) -> Any:
        return {op: get_replica_context().all_reduce(op, _leaves(x)) for op in BOTH}

    _same(strategy.run(step, (rows,)), {op: _expected(op, ROWS) for op in BOTH})


@pytest.mark.parametrize("name", OPS)
def test_reduce_and_merge_calls_are_by_the_ops_too(name: str, rows: PerReplica) -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], OPS[name])
    across = strategy.run(_leaves, (rows,))
    for op in BOTH:
        _same(strategy.reduce(op, across, axis=None), _expected(op, ROWS))
        found = strategy.extended.batch_reduce_to(op, [(rows, "cpu:1"), (across["c"], "cpu:3")])
        _same(found, [_expected(op, ROWS)["a"], _expected(op, ROWS)["c"]])
        assert [x.devices() for x in found] == [{jax.devices()[1]}, {jax.devices()[3]}]

    def step(x: Any) -> Any:
        def merge(strategy: Any, value: Any) -> Any:
            return {
                op: (strategy.extended.reduce_to(op, value, value), strategy.reduce(op, value, 0))
                for op in BOTH
            }

        return get_replica_context().merge_call(merge, (x,))

    found = strategy.run(step, (rows,))
    for op, inner in (("SUM", ROWS.sum()), ("MEAN", ROWS.mean())):
        _same(found[op][0], _expected(op, ROWS)["a"])
        np.testing.assert_allclose(found[op][1], inner, rtol=1e-6)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_dims_of_local_values_are_reduced_before_the_ops_are_asked(op: str) -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], ReductionToOneDevice())
    uneven = PerReplica([np.ones((3, 2), np.float32), np.full((1, 2), 5, np.float32)])
    found = strategy.reduce(op, uneven, axis=0)
    np.testing.assert_allclose(found, [8, 8] if op == "SUM" else [2, 2])
    even = strategy.run(lambda x: x, (PerReplica([np.ones((2, 3)), np.full((2, 3), 4.0)]),))
    np.testing.assert_allclose(
        strategy.reduce(op, {"x": even}, axis=(0, 1))["x"], 30 if op == "SUM" else 2.5
    )


@pytest.mark.parametrize("name", ["workers_by_size", "hierarchical", "one_device", "nccl_2_packs"])
def test_the_gradient_of_an_all_reduce_is_an_all_reduce(name: str, rows: PerReplica) -> None:
    def gradient(strategy: Any) -> Any:
        def step(x: Any) -> Any:
            def loss(x: Any) -> Any:
                y, n = get_replica_context().all_reduce("sum", [x * x, jnp.int32(3)])
                return (y * x).sum() * n

            return jax.grad(loss)(x), jax.jvp(loss, (x,), (jnp.ones_like(x),))[1]

        return strategy.run(step, (rows,))

    devices = [f"cpu:{i}" for i in range(4)]
    expected = gradient(MirroredStrategy(devices))
    for have, want in zip(gradient(MirroredStrategy(devices, OPS[name])), expected, strict=True):
        np.testing.assert_allclose(have.array, want.array, rtol=1e-5)


def test_under_vmap_scan_and_checkpoint_it_is_the_same(rows: PerReplica) -> None:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], OPS["workers_by_size"])

    def step(x: Any) -> Any:
        def total(v: Any) -> Any:
            return get_replica_context().all_reduce("sum", v)

        mapped = jax.vmap(total)(jnp.stack([x, 2 * x]))
        _, scanned = jax.lax.scan(lambda c, _: (c, total(x)), 0, length=3)
        again = jax.grad(lambda v: jax.checkpoint(lambda u: total(u * u))(v).sum())(x)
        return mapped, scanned, again

    mapped, scanned, again = strategy.run(step, (rows,))
    np.testing.assert_allclose(mapped, np.stack([ROWS.sum(0), 2 * ROWS.sum(0)]))
    np.testing.assert_allclose(scanned, np.tile(ROWS.sum(0), (3, 1)))
    np.testing.assert_allclose(np.stack(again.values), 8 * ROWS)


WITH_OPS = [row for row in STRATEGIES if row.name.startswith(("mirrored", "mesh"))]


@pytest.mark.parametrize("row", WITH_OPS, ids=lambda row: row.name)
def test_every_kind_of_mesh_gives_the_same(row: Row) -> None:
    count = row.num_replicas
    made = row.make()
    ops = MultiWorkerAllReduce(
        TWO_WORKERS if count % 2 == 0 else TWO_WORKERS[:1],
        count // 2 if count % 2 == 0 else count,
        [("xring", 2, 8), ("pscpu/pscpu", 1, 32), ("nccl/rechd", 1, -1)],
    )
    axes = made.layout.replica_axes
    strategy = MirroredStrategy(mesh=made.mesh, replica_axes=axes, cross_device_ops=ops)
    x = np.arange(count * 9, dtype=np.float32).reshape(count, 9)

    def step(v: Any) -> Any:
        return get_replica_context().all_reduce("sum", [v, v[:2], v[:5].astype(jnp.bfloat16)])

    found = strategy.run(step, (PerReplica(list(x)),))
    np.testing.assert_allclose(found[0], x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(found[1], x[:, :2].sum(0), rtol=1e-5)
    np.testing.assert_allclose(found[2].astype(np.float32), x[:, :5].sum(0), rtol=0.03)


def _kinds(ops: CrossDeviceOps, step: Any) -> Counter[str]:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], ops)
    compiled = strategy.lower(step, (PerReplica(list(ROWS)),)).compile()
    return Counter(c.kind for c in compiled.collectives)


def _five(x: Any) -> Any:
    return get_replica_context().all_reduce("sum", [x + i for i in range(5)])


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (NcclAllReduce(0), {"all-reduce": 1}),
        (NcclAllReduce(1), {"all-reduce": 1}),
        (NcclAllReduce(3), {"all-reduce": 3}),
        (NcclAllReduce(9), {"all-reduce": 5}),
        (ReductionToOneDevice(), {"collective-permute": 20}),
        (_workers(("xring", 1, -1), num_packs=1), {"collective-permute": 6}),
        (_workers(("xring", 1, -1), num_packs=2), {"collective-permute": 12}),
        (_workers(("nccl", 3, -1), num_packs=1), {"all-reduce": 3}),
        (_workers(("nccl", 1, -1), num_packs=4), {"all-reduce": 4}),
        (AllReduceCrossDeviceOps("nccl", num_packs=3), {"all-reduce": 3}),
        (
            HierarchicalCopyAllReduce(num_packs=2),
            {"reduce-scatter": 2, "all-reduce": 2, "all-gather": 2},
        ),
        (
            _workers(("xring", 1, -1), agg_small_grads_max_bytes=20, agg_small_grads_max_group=3),
            {"collective-permute": 12},
        ),
        (
            _workers(("nccl/xring", 2, -1), num_packs=1),
            {"reduce-scatter": 2, "collective-permute": 4, "all-gather": 2},
        ),
    ],
    ids=repr,
)
def test_packs_and_shards_are_counted_in_the_compiled_program(
    ops: CrossDeviceOps, expected: dict[str, int]
) -> None:
    assert _kinds(ops, _five) == expected


def test_tensors_go_to_the_entry_for_their_size_in_bytes() -> None:
    def step(x: Any) -> Any:
        # 16, 20 and 24 bytes.
        return get_replica_context().all_reduce("sum", [x[:4], x, jnp.concatenate([x, x[:1]])])

    ops = _workers([("nccl", 1, 16), ("xring", 1, 20), ("psgpu", 1, -1)])
    assert _kinds(ops, step) == {"all-reduce": 1, "collective-permute": 6 + 4}


def test_names_tuples_and_named_tuples_are_specs() -> None:
    spec = namedtuple("spec", "alg shards limit")
    for given, expected in (
        ("xring", [("xring", 1, -1)]),
        (("nccl",), [("nccl", 1, -1)]),
        (("nccl", 3), [("nccl", 3, -1)]),
        (spec("psgpu", 2, -1), [("psgpu", 2, -1)]),
        ([spec("nccl", 1, 8), ("pscpu",)], [("nccl", 1, 8), ("pscpu", 1, -1)]),
    ):
        found = MultiWorkerAllReduce(TWO_WORKERS, 2, given).all_reduce_spec
        assert [dataclasses.astuple(s) for s in found] == expected
    default = MultiWorkerAllReduce(TWO_WORKERS, 2)
    assert dataclasses.astuple(default.all_reduce_spec[0]) == ("pscpu/pscpu", 2, -1)
    assert (default.num_packs, default.agg_small_grads_max_group) == (0, 10)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("ring", ("'ring'", "'nccl/xring'")),
        (("nccl/nccl", 1, -1), ("'nccl/nccl'",)),
        (("nccl", 0, -1), ("shards", "0")),
        (("nccl", 1.5, -1), ("shards", "1.5")),
        (("nccl", 1, -1, 2), ("4 elements",)),
        ((), ("0 elements",)),
        ([("nccl", 1, 64), ("xring", 1, 64), ("psgpu", 1, -1)], ("[64, 64, -1]", "increase")),
        ([("nccl", 1, 128), ("xring", 1, 64), ("psgpu", 1, -1)], ("[64, 128, -1]",)),
        ([("nccl", 1, 64), ("xring", 1, 128)], ("[64, 128]", "the last one is -1")),
        ([("nccl", 1, -1), ("xring", 1, -1)], ("[-1, -1]",)),
        (["nccl"], ("Each entry is a tuple", "'nccl'")),
        ((("nccl", 1, 64), ("xring", 1, -1)), ("a tuple of tuples", "[('nccl', 1, 64), ('xring'")),
        ([], ("all_reduce_spec is the name",)),
        ({"nccl": 1}, ("all_reduce_spec is the name", "dict")),
        (None, ("all_reduce_spec is the name", "NoneType")),
    ],
    ids=repr,
)
def test_wrong_specs_are_refused(spec: Any, parts: tuple[str, ...]) -> None:
    with refused(ArgumentError, "MultiWorkerAllReduce", *parts):
        MultiWorkerAllReduce(TWO_WORKERS, 2, spec)


@pytest.mark.parametrize(
    ("workers", "error", "part"),
    [
        ([], ArgumentError, "one for each worker"),
        ("cpu:0", ArgumentError, "one for each worker"),
        ([3], ArgumentError, "one for each worker"),
        (["cpu:0", "cpu:0"], ArgumentError, "one worker twice"),
        (["cpu:0", "cpu:99"], DeviceError, "'cpu:99' does not exist"),
        (["gpu:0"], DeviceError, "gpu"),
        (["/job:worker/task:5", "/job:worker/task:0"], DeviceError, "from 0 to 1"),
        (["worker"], DeviceError, "'worker' is not the name of a device"),
    ],
    ids=repr,
)
def test_workers_that_do_not_exist_are_refused(workers: Any, error: Any, part: str) -> None:
    with refused(error, part):
        MultiWorkerAllReduce(workers, 2)


def test_workers_that_do_not_match_the_replicas_are_refused_with_the_number_that_does() -> None:
    ops = MultiWorkerAllReduce(TWO_WORKERS, 3)
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], ops)
    with refused(ArgumentError, "6 together", "4 replicas", "num_gpus_per_worker=2"):
        strategy.run(_five, (PerReplica(list(ROWS)),))
    with refused(ArgumentError, "one of [1, 2, 4, 8] names"):
        MultiWorkerAllReduce(["cpu:0", "cpu:1", "cpu:2"], 1).reduce(
            "SUM", PerReplica(range(8)), "cpu:0"
        )


@pytest.mark.parametrize(
    "make", [NcclAllReduce, HierarchicalCopyAllReduce, AllReduceCrossDeviceOps]
)
@pytest.mark.parametrize("number", [-1, 1.5, "2", None, True], ids=repr)
def test_numbers_of_packs_that_mean_nothing_are_refused(make: Any, number: Any) -> None:
    with refused(ArgumentError, "num_packs", repr(number)):
        make(num_packs=number)


# On their own


@pytest.mark.parametrize("name", OPS)
def test_on_their_own_they_reduce_what_replicas_have(name: str, rows: PerReplica) -> None:
    ops = OPS[name]
    total = ops.reduce("SUM", rows, [f"cpu:{i}" for i in range(4)])
    np.testing.assert_allclose(total, ROWS.sum(0))
    assert total.is_fully_replicated
    assert len(total.devices()) == 4
    pairs = [(rows, "cpu:5"), (PerReplica([1, 2, 3, 4]), rows)]
    mean, scalar = ops.batch_reduce(jaxdist.ReduceOp.MEAN, pairs)
    np.testing.assert_allclose(mean, ROWS.mean(0))
    assert mean.devices() == {jax.devices()[5]}
    assert (float(scalar), scalar.shape) == (2.5, ())


def test_the_documented_known_answers() -> None:
    ops = NcclAllReduce()
    for count, total, mean in ((1, 1, 1), (2, 3, 1.5), (4, 10, 2.5)):
        values = PerReplica([1.0, 2.0, 3.0, 4.0][:count])
        assert float(ops.reduce("SUM", values, "cpu:0")) == total
        assert float(ops.reduce("MEAN", values, "cpu:0")) == mean
    values = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 5.0])])
    product = ReductionToOneDevice(accumulation_fn=lambda v: v[0] * v[1])
    assert product.reduce("SUM", values, "cpu:0").tolist() == [3, 10]
    assert product.reduce("MEAN", values, "cpu:0").tolist() == [1.5, 5]
    three = PerReplica([1.0, 2.0, 3.0])
    for ops in (HierarchicalCopyAllReduce(), HierarchicalCopyAllReduce(0)):
        assert float(ops.batch_reduce("SUM", [(three, "cpu:0")])[0]) == 6


def test_values_lie_where_they_were_made_or_where_they_go() -> None:
    strategy = MirroredStrategy(["cpu:4", "cpu:5"])
    made = strategy.run(lambda x: x * 2, (PerReplica([1.0, 2.0]),))
    assert float(NcclAllReduce().reduce("SUM", made, made)) == 6
    found = NcclAllReduce().reduce("SUM", made, made)
    assert found.devices() == {jax.devices()[4], jax.devices()[5]}
    laid_out = jax.device_put(np.arange(4.0), strategy.per_replica_sharding)
    assert NcclAllReduce().reduce("SUM", laid_out, "cpu:0").tolist() == [2, 4]
    same = jax.device_put(np.float32(3), strategy.replicated_sharding)
    assert float(NcclAllReduce().reduce("SUM", same, "cpu:0")) == 6
    assert float(NcclAllReduce().reduce("MEAN", np.float32(3), "cpu:0")) == 3


def test_broadcast_and_gather_need_no_subclass() -> None:
    ops = CrossDeviceOps()
    assert ops.broadcast(np.ones(2), ["cpu:0", "cpu:1"]).is_fully_replicated
    rows = PerReplica([np.zeros((1, 2)), np.ones((2, 2))])
    assert ops.gather(rows, "cpu:3", axis=0).shape == (3, 2)
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        ops.reduce("SUM", PerReplica([1, 2]), "cpu:0")


@pytest.mark.parametrize("value", ["text", None, object, PerReplica(["a", "b"])], ids=str)
def test_what_cannot_be_a_per_replica_is_refused(value: Any) -> None:
    with refused(ReplicaValueError, "per_replica_value", "PerReplica"):
        NcclAllReduce().reduce("SUM", value, "cpu:0")


@pytest.mark.parametrize("destinations", ["", None, [], 3], ids=repr)
def test_destinations_that_are_none_are_refused(destinations: Any) -> None:
    with refused(ArgumentError, "destinations="):
        NcclAllReduce().reduce("SUM", PerReplica([1, 2]), destinations)


@pytest.mark.parametrize("pairs", [None, 3, [1], [(1,)], "ab", {"a": 1}], ids=repr)
def test_pairs_that_are_none_are_refused(pairs: Any) -> None:
    with refused(ArgumentError, "NcclAllReduce.batch_reduce", "(value, destinations)"):
        NcclAllReduce().batch_reduce("SUM", pairs)


def test_shapes_that_differ_between_replicas_are_all_named() -> None:
    good = PerReplica([np.ones(2), np.ones(2)])
    bad = PerReplica([np.ones(2), np.ones(3)])
    other = PerReplica([np.ones(2, np.float32), np.ones(2, np.int32)])
    pairs = [(v, "cpu:0") for v in (good, bad, other)]
    with refused(
        ShapeError, "value 1: replicas [0]: float32[2], replicas [1]: float32[3]", "value 2"
    ):
        NcclAllReduce().batch_reduce("SUM", pairs)


def test_more_values_than_devices_are_refused_with_the_remedy() -> None:
    with refused(ReplicaValueError, "9 values", "8 device(s)", "virtual_devices(9)"):
        NcclAllReduce().reduce("SUM", PerReplica(range(9)), "cpu:0")
    with refused(ReplicaValueError, "[2, 3]"):
        NcclAllReduce().batch_reduce(
            "SUM", [(PerReplica([1, 2]), "cpu:0"), (PerReplica([1, 2, 3]), "cpu:0")]
        )


def test_a_device_that_no_replica_has_is_refused_when_it_is_used() -> None:
    with refused(DeviceError, "no replica", "reduce_to_device"):
        ReductionToOneDevice("cpu:7").reduce("SUM", PerReplica([1, 2]), ["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("gives", "told"),
    [
        (lambda v: v[0].sum(), "float32[] for 2 values float32[2]"),
        (lambda v: (v[0] + v[1]).astype("bfloat16"), "bfloat16[2] for 2 values float32[2]"),
        (lambda v: [1.0, 2.0], "[1.0, 2.0], of type list, for 2 values float32[2]"),
    ],
    ids=["shape", "dtype", "list"],
)
def test_an_accumulation_of_another_shape_or_dtype_is_refused(gives: Any, told: str) -> None:
    ops = ReductionToOneDevice(accumulation_fn=gives)
    with refused(ShapeError, "accumulation_fn <lambda> of ReductionToOneDevice", told, "astype"):
        ops.reduce("SUM", PerReplica([np.ones(2, "float32")] * 2), "cpu:0")


def test_an_accumulation_that_fails_is_named_and_one_in_numpy_is_told_what_to_use() -> None:
    def product(values: Any) -> Any:
        return {}["factor"]

    def median(values: Any) -> Any:
        return np.median(np.stack(values), axis=0)

    values = PerReplica([np.ones(2, "float32")] * 2)
    with pytest.raises(KeyError, match="factor") as caught:
        ReductionToOneDevice(accumulation_fn=product).reduce("SUM", values, "cpu:0")
    note = "\n".join(caught.value.__notes__)
    assert "accumulation_fn product of ReductionToOneDevice, called for 2 values float" in note
    with refused(ArgumentTypeError, "accumulation_fn median", "2 values", "jax.numpy"):
        ReductionToOneDevice(accumulation_fn=median).reduce("SUM", values, "cpu:0")
    with refused(ArgumentTypeError, "accumulation_fn=3, of type int", "list of the values"):
        ReductionToOneDevice(accumulation_fn=3)  # pyrefly: ignore


def test_a_subclass_that_uses_numpy_on_traced_values_is_told_what_to_use(rows: PerReplica) -> None:
    class Median(CrossDeviceOps):
        def reduce_implementation(
            self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
        ) -> Any:
            if reduce_op is ReduceOp.MEAN:
                return per_replica_value.values[0] if per_replica_value.values[0].sum() else None
            return np.median(np.stack(per_replica_value.values), axis=0)

    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], Median())
    for op in ("sum", "mean"):
        with refused(
            ArgumentTypeError,
            "Median.reduce_implementation",
            "float32[5]",
            "jax.numpy",
            "jnp.where",
        ):
            strategy.run(lambda x, op=op: get_replica_context().all_reduce(op, x), (rows,))


def test_ops_reduce_values_in_a_jit_of_the_users_own() -> None:
    rows = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def reduced(x: Any) -> Any:
        return NcclAllReduce().reduce("SUM", PerReplica([x[0], x[1] * x[1]]), ["cpu:0", "cpu:1"])

    np.testing.assert_allclose(jax.jit(reduced)(rows), rows[0] + rows[1] ** 2)
    gradient = jax.grad(lambda x: reduced(x).sum())(jnp.asarray(rows))
    np.testing.assert_allclose(gradient, [np.ones(3), 2 * rows[1]])


def test_errors_name_the_method_that_was_called() -> None:
    class Own(CrossDeviceOps):
        pass

    uneven = PerReplica([np.ones((1, 2)), np.ones((1, 3))])
    for ops in (NcclAllReduce(), ReductionToOneDevice(), Own()):
        name = type(ops).__name__
        with refused(ShapeError, f"{name}.gather", "float32[1, 3]") as caught:
            ops.gather(uneven, "cpu:0", axis=0)
        with refused(ShapeError, f"{name}.gather", "scalar"):
            ops.gather(PerReplica([1, 2]), "cpu:0", axis=0)
        assert "Strategy" not in str(caught.value)
        if not isinstance(ops, Own):
            with refused(ShapeError, f"{name}.reduce was given"):
                ops.reduce("SUM", uneven, "cpu:0")
            with refused(ShapeError, f"{name}.batch_reduce was given"):
                ops.batch_reduce("SUM", [(uneven, "cpu:0")])


def test_the_gradient_of_an_accumulation_is_its_own() -> None:
    ops = ReductionToOneDevice(accumulation_fn=lambda v: v[0] * v[1])
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], ops)

    def step(x: Any) -> Any:
        return jax.grad(lambda v: get_replica_context().all_reduce("sum", v))(x)

    # Each replica's product adds to the gradient of both factors.
    found = strategy.run(step, (PerReplica([3.0, 5.0]),))
    np.testing.assert_allclose(found.values, [10, 6])


# A user's own


class _Recorded(CrossDeviceOps):
    """Ops that sum the result of an all-gather, and record their calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.asked.append((reduce_op.name, len(per_replica_value.values)))
        assert jaxdist.in_cross_replica_context() or not jaxdist.has_strategy()
        total = sum(per_replica_value.values)
        return total / len(per_replica_value.values) if reduce_op.name == "MEAN" else total


def test_a_subclass_of_the_user_is_what_run_and_reduce_use(rows: PerReplica) -> None:
    ops = _Recorded()
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], ops)

    def step(x: Any) -> Any:
        return get_replica_context().all_reduce("mean", {"x": x, "y": x * 2})

    found = strategy.run(step, (rows,))
    np.testing.assert_allclose(found["y"], 2 * ROWS.mean(0))
    assert ops.asked == [("MEAN", 4)] * 2
    assert isinstance(found["x"], jax.Array)
    assert float(strategy.reduce("SUM", PerReplica([1, 2, 3, 4]), axis=None)) == 10
    assert ops.asked[2:] == [("SUM", 4)]


def test_a_subclass_may_see_all_leaves_at_once(rows: PerReplica) -> None:
    class Batched(CrossDeviceOps):
        def batch_reduce_implementation(
            self, reduce_op: Any, value_destination_pairs: Any, options: Any
        ) -> Any:
            seen.append(len(value_destination_pairs))
            return NcclAllReduce().batch_reduce(reduce_op, value_destination_pairs, options)

    seen: list[int] = []
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], Batched())
    found = strategy.run(_five, (rows,))
    assert seen == [5]
    np.testing.assert_allclose(found[4], (ROWS + 4).sum(0))
    assert float(Batched().reduce("SUM", PerReplica([1, 2]), "cpu:0")) == 3


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (lambda v: None, "None, of type NoneType"),
        (lambda v: v.values, "a tuple of 4"),
        (lambda v: v.values[0][:1], "an array float32[1]"),
        (lambda v: "text", "'text'"),
        (lambda v: v, "a PerReplica"),
    ],
    ids=["none", "all_values", "shape", "text", "not_reduced"],
)
def test_a_subclass_that_returns_the_wrong_thing_is_named(
    result: Any, part: str, rows: PerReplica
) -> None:
    class Wrong(CrossDeviceOps):
        def reduce_implementation(
            self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
        ) -> Any:
            return result(per_replica_value)

    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], Wrong())
    with refused(ReplicaValueError, "Wrong.reduce_implementation", part, "shape [5]"):
        strategy.run(lambda x: get_replica_context().all_reduce("sum", x), (rows,))
    with refused(ReplicaValueError, "Wrong.reduce_implementation", part, "shape [5]"):
        strategy.reduce("SUM", rows, axis=None)


def test_a_subclass_that_returns_too_few_is_named(rows: PerReplica) -> None:
    class Few(CrossDeviceOps):
        def batch_reduce_implementation(
            self, reduce_op: Any, value_destination_pairs: Any, options: Any
        ) -> Any:
            return [value_destination_pairs[0][0].values[0]]

    strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], Few())
    with refused(ReplicaValueError, "a list of 1", "5 (value, destinations) pairs"):
        strategy.run(_five, (rows,))


# Options of the strategy


def test_options_of_the_strategy_hold_where_a_call_says_nothing(rows: PerReplica) -> None:
    for keyword in ("options", "experimental_hints"):
        given: dict[str, Any] = {keyword: CommunicationOptions(bytes_per_pack=1)}
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], **given)
        compiled = strategy.lower(_five, (rows,)).compile()
        assert len(compiled.collectives) == 5

        def step(x: Any) -> Any:
            options = CommunicationOptions(bytes_per_pack=1000)
            return get_replica_context().all_reduce("sum", [x, x + 1], options)

        assert len(strategy.lower(step, (rows,)).compile().collectives) == 1


def test_explain_shows_the_hints_that_ops_do_not_follow(rows: PerReplica) -> None:
    strategy = MirroredStrategy(
        [f"cpu:{i}" for i in range(4)],
        HierarchicalCopyAllReduce(),
        options=CommunicationOptions(bytes_per_pack=7),
    )
    text = str(strategy.lower(_five, (rows,)).explain())
    assert "HierarchicalCopyAllReduce(num_packs=1): 2 groups of 2 replicas" in text
    found = "bytes_per_pack: HierarchicalCopyAllReduce(num_packs=1) packs as its own arguments say"
    assert found in text


def test_an_option_of_the_strategy_is_told_once_however_many_calls_ignore_it(
    rows: PerReplica,
) -> None:
    def step(x: Any) -> Any:
        context = get_replica_context()
        merged = context.merge_call(lambda s, v: s.reduce("sum", v, axis=None), args=(x,))
        own = CommunicationOptions(timeout_seconds=5.0)
        return merged, context.all_reduce("sum", x, own), context.all_gather(x, axis=0)

    options = CommunicationOptions(timeout_seconds=3.0, bytes_per_pack=8, implementation="RING")
    for ops in (None, ReductionToOneDevice()):
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(4)], ops, options=options)
        told = strategy.lower(step, (rows,)).explain().ignored
        starts = sorted(t.partition(":")[0] for t in told)
        by_ops = ["bytes_per_pack"] if ops else []
        assert starts == [
            *by_ops,
            "implementation given to the strategy",
            "timeout_seconds given to ReplicaContext.all_reduce",
            "timeout_seconds given to the strategy",
        ]


def test_a_subclass_gathers_and_broadcasts_for_its_strategy_where_it_says_how() -> None:
    class Reversed(CrossDeviceOps):
        def gather_implementation(
            self, per_replica_value: Any, destinations: Any, axis: int, options: Any
        ) -> Any:
            return jnp.concatenate(per_replica_value.values[::-1], axis=axis)

        def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
            return super().broadcast_implementation(tensor * 2, destinations)

    class Wrong(CrossDeviceOps):
        def gather_implementation(
            self, per_replica_value: Any, destinations: Any, axis: int, options: Any
        ) -> Any:
            return per_replica_value.values

    def step(x: Any) -> Any:
        context = get_replica_context()
        merged = context.merge_call(
            lambda s, v: (s.gather(v, axis=0), s.extended.broadcast_to(3.0, v)), args=(x,)
        )
        return context.all_gather({"x": x}, axis=0)["x"], *merged

    rows = PerReplica([np.full((1, 2), r, np.float32) for r in range(4)])
    devices = [f"cpu:{i}" for i in range(4)]
    strategy = MirroredStrategy(devices, Reversed())
    placed = strategy.run(lambda x: x, (rows,))
    inside, merged, doubled = strategy.run(step, (rows,))
    for found in (strategy.gather({"a": rows}, axis=0)["a"], strategy.gather(placed, axis=0)):
        np.testing.assert_array_equal(np.asarray(found)[:, 0], [3, 2, 1, 0])
    for found in (inside, merged):
        np.testing.assert_array_equal(np.asarray(found)[:, 0], [3, 2, 1, 0])
    assert float(doubled) == 6.0
    assert float(strategy.extended.broadcast_to(jnp.float32(3), devices)) == 6.0
    wrong = MirroredStrategy(devices, Wrong())
    for call in (
        lambda: wrong.gather({"a": rows}, axis=0)["a"],
        lambda: wrong.run(lambda x: get_replica_context().all_gather({"a": x}, axis=0), (rows,)),
    ):
        with refused(ReplicaValueError, "Wrong.gather_implementation", "value['a']", "rank 2"):
            call()


def test_values_that_differ_are_named_before_the_code_of_a_subclass_is_called() -> None:
    class Own(CrossDeviceOps):
        def reduce_implementation(
            self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
        ) -> Any:
            raise AssertionError("it was called")

    uneven = PerReplica([np.ones(2, np.float32), np.ones(3, np.float32)])
    mixed = PerReplica([np.ones(2, np.float32), np.ones(2, np.int32)])
    with refused(
        ShapeError, "Own.batch_reduce", "2 values", "value 0", "value 1: replicas [0]: fl"
    ):
        Own().batch_reduce("SUM", [(uneven, "cpu:0"), (mixed, "cpu:0")])
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], Own())
    with refused(ShapeError, "Strategy.reduce", "2 values", "value[0]", "value[1]"):
        strategy.reduce("SUM", [uneven, mixed], axis=None)
