"""The mean of integers and booleans is a float, for every number of replicas and way to reduce."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import IndexedSlices, PerReplica, get_replica_context
from tests.tables import sampled

VALUES: dict[str, Any] = {
    "bool": np.bool_(True),
    "uint8": np.uint8(3),
    "int8": np.int8(3),
    "int32": np.int32(3),
    "int64": np.int64(3),
    "uint32": np.uint32(3),
    "a number": 3,
    "True": True,
}


def _mirrored(count: int, **options: Any) -> Callable[[], Any]:
    return lambda: jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)], **options)


def _central(count: int) -> Callable[[], Any]:
    devices = [f"cpu:{i}" for i in range(count)]
    return lambda: jaxdist.experimental.CentralStorageStrategy(devices)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "the default one": jaxdist.get_strategy,
    "OneDevice": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "1 replica": _mirrored(1),
    "2 replicas": _mirrored(2),
    "4 replicas": _mirrored(4),
    "1 by messages": _mirrored(1, cross_device_ops=jaxdist.ReductionToOneDevice()),
    "2 by messages": _mirrored(2, cross_device_ops=jaxdist.ReductionToOneDevice()),
    "2 by levels": _mirrored(2, cross_device_ops=jaxdist.HierarchicalCopyAllReduce()),
    "1 with central storage": _central(1),
    "2 with central storage": _central(2),
    "virtual ones": _mirrored(2, deterministic=True),
}


def _each(strategy: Any, value: Any) -> PerReplica:
    return PerReplica([value] * strategy.num_replicas_in_sync)


def _merge(strategy: Any, value: Any, merge: Callable[[Any, Any], Any]) -> Any:
    def step() -> Any:
        return get_replica_context().merge_call(merge, args=(jnp.asarray(value),))

    return strategy.run(step)


def _all_reduce(strategy: Any, value: Any) -> Any:
    return strategy.run(lambda: get_replica_context().all_reduce("mean", value))


def _op_by_op(strategy: Any, value: Any) -> Any:
    with jax.disable_jit():
        return _all_reduce(strategy, jnp.asarray(value))


def _outside_by(ops: Any, strategy: Any, value: Any) -> Any:
    return ops.reduce("mean", _each(strategy, value), [str(d) for d in strategy.layout.devices])


def _rows(value: Any) -> Any:
    return np.full(4, value)


def _slices(value: Any) -> IndexedSlices:
    return IndexedSlices(jnp.asarray(_rows(value)), jnp.arange(4), (4,))


def _first_target(strategy: Any) -> Any:
    return strategy.extended.worker_devices[0]


Way = Callable[[Any, Any], Any]
WAYS: dict[str, Way] = {
    "reduce of an equal result": lambda s, v: s.reduce(
        "mean", s.run(lambda: jnp.asarray(v)), axis=None
    ),
    "reduce of a plain value": lambda s, v: s.reduce("mean", v, axis=None),
    "reduce of an array": lambda s, v: s.reduce("mean", jnp.asarray(v), axis=None),
    "reduce of a dict": lambda s, v: s.reduce("mean", {"a": v}, axis=None)["a"],
    "reduce of PerReplica": lambda s, v: s.reduce("mean", _each(s, v), axis=None),
    "reduce of rows": lambda s, v: s.reduce("mean", _each(s, _rows(v)), axis=None),
    "reduce over axis 0": lambda s, v: s.reduce("mean", _each(s, _rows(v)), axis=0),
    "reduce of one array over axis 0": lambda s, v: s.reduce("mean", _rows(v), axis=0),
    "reduce of slices": lambda s, v: s.reduce("mean", _slices(v), axis=None),
    "reduce under jit": lambda s, v: jax.jit(
        lambda: s.reduce("mean", s.run(lambda: jnp.asarray(v)), axis=None)
    )(),
    "reduce in a function": lambda s, v: jaxdist.function(lambda x: s.reduce("mean", x, axis=None))(
        jnp.asarray(v)
    ),
    "all_reduce": _all_reduce,
    "all_reduce of an array": lambda s, v: _all_reduce(s, jnp.asarray(v)),
    "all_reduce of slices": lambda s, v: _all_reduce(s, _slices(v)),
    "all_reduce op by op": _op_by_op,
    "all_reduce outside of a step": lambda _, v: get_replica_context().all_reduce("mean", v),
    "all_reduce of slices outside": lambda _, v: get_replica_context().all_reduce(
        "mean", _slices(v)
    ),
    "reduce_to": lambda s, v: s.extended.reduce_to("mean", _each(s, v), _first_target(s)),
    "reduce_to of an array": lambda s, v: s.extended.reduce_to(
        "mean", jnp.asarray(v), _first_target(s)
    ),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to(
        "mean", [(_each(s, v), _first_target(s))]
    )[0],
    "merge_call, reduce": lambda s, v: _merge(s, v, lambda s, x: s.reduce("mean", x, axis=None)),
    "merge_call, reduce_to": lambda s, v: _merge(
        s, v, lambda s, x: s.extended.reduce_to("mean", x, x)
    ),
    "merge_call, a constant": lambda s, v: _merge(
        s, v, lambda s, _: s.reduce("mean", jnp.asarray(v), axis=None)
    ),
    "ReductionToOneDevice": lambda s, v: _outside_by(jaxdist.ReductionToOneDevice(), s, v),
    "NcclAllReduce": lambda s, v: _outside_by(jaxdist.NcclAllReduce(), s, v),
}
# Steps of virtual replicas are run neither op by op nor inside of `jax.jit`.
_NOT = [("all_reduce op by op", "virtual ones"), ("reduce under jit", "virtual ones")]
TABLE = [(w, s, v) for w in WAYS for s in STRATEGIES for v in VALUES if (w, s) not in _NOT]


# The default strategy is one object, which sees a new function in each row.
@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("row", sampled(TABLE, 60, name=", ".join))
def test_the_mean_of_integers_is_a_float(row: tuple[str, str, str]) -> None:
    way, of, kind = row
    value = VALUES[kind]
    got = WAYS[way](STRATEGIES[of](), value)
    # The rows of several replicas are divided, and added where they are used.
    got = got.to_dense() if isinstance(got, IndexedSlices) else got
    assert jnp.asarray(got).dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got), np.full(np.shape(got), value, np.float32))


@pytest.mark.parametrize("way", ["reduce of an array", "all_reduce", "reduce of slices"])
@pytest.mark.parametrize("count", [1, 2])
def test_with_x64_the_mean_of_integers_is_a_float64(way: str, count: int) -> None:
    with jax.enable_x64(True):
        got = WAYS[way](_mirrored(count)(), np.int64(2**40 + 1))
        got = got.values if isinstance(got, IndexedSlices) else got
        assert np.asarray(got).dtype == np.float64
        assert np.all(np.asarray(got) == 2**40 + 1)


@pytest.mark.parametrize("of", ["1 replica", "2 replicas", "the default one"])
def test_a_sum_counts_booleans(of: str) -> None:
    strategy = STRATEGIES[of]()
    got = strategy.reduce("sum", strategy.run(lambda: jnp.asarray(True)), axis=None)
    assert (got.dtype, int(got)) == (jnp.int32, strategy.num_replicas_in_sync)


@pytest.mark.parametrize("value", [np.float16(1.5), 2.5, 1j], ids=str)
def test_floats_keep_their_dtype(value: Any) -> None:
    for of in ("1 replica", "2 replicas", "the default one"):
        got = STRATEGIES[of]().reduce("mean", value, axis=None)
        assert got == value
        assert jnp.asarray(got).dtype == jnp.asarray(value).dtype
