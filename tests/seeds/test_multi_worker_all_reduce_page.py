"""The page of `tf.contrib.distribute.MultiWorkerAllReduce`: its signature, arguments and methods.

Changes: `jaxdist` for `tf`, and the limit of a spec is a number of bytes in every algorithm.
"""

import inspect
from collections import Counter, namedtuple
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, ReduceOp
from jaxdist.contrib import AllReduceCrossDeviceOps, MultiWorkerAllReduce

_WORKERS = ["/job:worker/task:0", "/job:worker/task:1"]
_NAMES = ["nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu", "xring", "pscpu", "psgpu"]
_ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)
_EXAMPLE = [("nccl", 2, 1024), ("pscpu/pscpu", 2, -1)]


def _make(spec: Any = ("pscpu/pscpu", 2, -1), **more: Any) -> MultiWorkerAllReduce:
    return MultiWorkerAllReduce(_WORKERS, 2, spec, **more)


def _count(ops: MultiWorkerAllReduce, *shapes: int) -> Counter[str]:
    """Return the collectives of a step that all-reduces arrays of these sizes."""
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)], ops)

    def step(values: Any) -> Any:
        replica = jaxdist.get_replica_context()
        assert replica is not None
        return replica.all_reduce("sum", values)

    values = [PerReplica([np.full(n, r, np.float32) for r in range(4)]) for n in shapes]
    for total in strategy.run(step, (values,)):
        np.testing.assert_allclose(total, 6)
    compiled = strategy.lower(step, (values,)).compile()
    return Counter(c.kind for c in compiled.collectives)


def test_the_signature_is_that_of_the_page() -> None:
    found = inspect.signature(MultiWorkerAllReduce).parameters
    assert {name: p.default for name, p in found.items()} == {
        "worker_devices": inspect.Parameter.empty,
        "num_gpus_per_worker": inspect.Parameter.empty,
        "all_reduce_spec": ("pscpu/pscpu", 2, -1),
        "num_packs": 0,
        "agg_small_grads_max_bytes": 0,
        "agg_small_grads_max_group": 10,
    }
    assert issubclass(MultiWorkerAllReduce, AllReduceCrossDeviceOps)


@pytest.mark.parametrize("name", [*_NAMES, "pscpu/pscpu"])
@pytest.mark.parametrize("form", ["tuple", "named tuple", "list"])
def test_every_algorithm_of_the_page_adds_up_the_replicas(name: str, form: str) -> None:
    named = namedtuple("named", "alg shards limit")
    forms = {"tuple": (name, 2, -1), "named tuple": named(name, 2, -1), "list": [(name, 2, -1)]}
    ops = _make(forms[form])
    strategy = jaxdist.MirroredStrategy([f"cpu:{n}" for n in range(4)], ops)

    def step(x: Any) -> Any:
        replica = jaxdist.get_replica_context()
        assert replica is not None
        return replica.all_reduce("sum", x)

    np.testing.assert_allclose(strategy.run(step, (PerReplica(list(_ROWS)),)), _ROWS.sum(0))


def test_an_algorithm_that_the_page_does_not_have_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'ring'"):
        _make(("ring", 2, -1))


def test_a_hierarchical_algorithm_aggregates_within_a_worker_and_then_across_workers() -> None:
    within_and_across = _count(_make(("nccl/xring", 1, -1)), 8)
    assert within_and_across == {"reduce-scatter": 1, "collective-permute": 2, "all-gather": 1}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_packed_tensor_is_split_into_as_many_shards_as_the_second_element_says(
    shards: int,
) -> None:
    assert _count(_make(("nccl", shards, -1), num_packs=1), 8, 12) == {"all-reduce": shards}


def test_the_third_element_is_the_largest_size_that_an_algorithm_takes() -> None:
    small = _count(_make(_EXAMPLE), 256)  # 1,024 bytes
    assert small == {"all-reduce": 2}
    large = _count(_make(_EXAMPLE), 257)
    assert "all-reduce" not in large
    assert large["collective-permute"] > 0


@pytest.mark.parametrize(
    "spec",
    [
        [("nccl", 2, 2048), ("xring", 2, 1024), ("pscpu/pscpu", 2, -1)],
        [("nccl", 2, 1024), ("pscpu/pscpu", 2, 2048)],
        [("nccl", 2, -1), ("pscpu/pscpu", 2, -1)],
    ],
    ids=["do not increase", "end without -1", "-1 before the end"],
)
def test_limits_that_do_not_increase_to_minus_one_are_value_errors(spec: Any) -> None:
    with pytest.raises(ValueError, match="increase"):
        _make(spec)


def test_packing_is_that_of_the_base_class() -> None:
    assert _count(_make(("nccl", 1, -1), num_packs=3), 8, 8, 8, 8, 8) == {"all-reduce": 3}
    grouped = _make(("nccl", 1, -1), agg_small_grads_max_bytes=64, agg_small_grads_max_group=2)
    assert (grouped.agg_small_grads_max_bytes, grouped.agg_small_grads_max_group) == (64, 2)
    assert _count(grouped, 8, 8, 8, 8) == {"all-reduce": 2}


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("pairs", [list, tuple])
def test_batch_reduce_reduces_each_value_to_its_destination(op: ReduceOp, pairs: type) -> None:
    first, second = PerReplica(list(_ROWS)), PerReplica([1.0, 2.0, 3.0, 6.0])
    found = _make().batch_reduce(op, pairs([(first, "cpu:3"), (second, second)]))
    assert isinstance(found, list)
    by_row, scalar = found
    expected = _ROWS.sum(0) if op is ReduceOp.SUM else _ROWS.mean(0)
    np.testing.assert_allclose(by_row, expected, rtol=1e-6)
    assert by_row.devices() == {jax.devices()[3]}
    assert float(scalar) == (12.0 if op is ReduceOp.SUM else 3.0)
    assert scalar.is_fully_replicated


def test_a_plain_array_counts_where_there_is_one_device() -> None:
    one = jax.device_put(np.float32(3), jax.devices()[1])
    ops = MultiWorkerAllReduce(["cpu:1"], 1)
    [found] = ops.batch_reduce("sum", [(one, "cpu:1")])
    assert float(found) == 3


@pytest.mark.parametrize("pairs", [None, 3, "ab", [1], [(1,)], {"a": 1}], ids=repr)
def test_batch_reduce_of_other_things_is_a_value_error(pairs: Any) -> None:
    with pytest.raises(ValueError, match="batch_reduce"):
        _make().batch_reduce("sum", pairs)


def test_broadcast_puts_a_tensor_on_all_destinations() -> None:
    found = _make().broadcast(np.arange(3.0), ["cpu:0", "cpu:2"])
    assert found.is_fully_replicated
    assert found.devices() == {jax.devices()[0], jax.devices()[2]}
    np.testing.assert_allclose(found, np.arange(3.0))


def test_reduce_puts_what_the_operation_gives_on_the_destinations() -> None:
    found = _make().reduce("mean", PerReplica(list(_ROWS)), ["cpu:0", "cpu:1"])
    np.testing.assert_allclose(found, _ROWS.mean(0), rtol=1e-6)
    assert found.devices() == {jax.devices()[0], jax.devices()[1]}


@pytest.mark.parametrize("value", ["text", None, object()], ids=["text", "None", "object"])
def test_reduce_of_what_is_no_per_replica_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match="per_replica_value"):
        _make().reduce("sum", value, "cpu:0")
