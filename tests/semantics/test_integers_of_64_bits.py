"""Integers of 64 bits: a value that does not fit is a named error, one that fits passes.

Without `jax_enable_x64`, JAX keeps the lower 32 bits, so 2**40 + 5 would become 5.
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Variable, get_replica_context, training
from jaxdist.errors import JaxdistError
from tests.tables import sampled

ARRAYS: dict[str, tuple[np.ndarray, bool]] = {
    "int64 that fits": (np.array([3, -(2**31), 2**31 - 1, 0]), True),
    "2**40 + 5": (np.array([2**40 + 5, 1, 2, 3]), False),
    "2**31": (np.array([0, 1, 2, 2**31]), False),
    "-2**31 - 1": (np.array([-(2**31) - 1, 1, 2, 3]), False),
    "uint64 that fits": (np.array([3, 2**32 - 1, 0, 5], np.uint64), True),
    "2**32 as uint64": (np.array([3, 2**32, 0, 5], np.uint64), False),
    "no elements": (np.zeros((0,), np.int64), True),
}


def _mirrored(count: int) -> Any:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


STRATEGIES: dict[str, Callable[[], Any]] = {
    "the default one": jaxdist.get_strategy,
    "OneDevice": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "1 replica": lambda: _mirrored(1),
    "2 replicas": lambda: _mirrored(2),
    "2 virtual ones": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True),
    "central storage": lambda: jaxdist.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def _same(x: Any) -> Any:
    return x


def _each(s: Any, a: Any) -> PerReplica:
    return PerReplica([a] * s.num_replicas_in_sync)


def _find_largest(a: Any) -> Any:
    return a[np.argmax(np.abs(a.astype(float)))] if a.size else a


def _op_by_op(s: Any, a: Any) -> Any:
    with jax.disable_jit():
        return s.run(_same, (a,))


def _second_call(s: Any, a: Any) -> Any:
    """JAX's call path in C++ takes int64 and int32 arrays of NumPy for the same."""
    step = jax.tree_util.Partial(_same)
    s.run(step, (np.zeros(a.shape, a.dtype),))
    return s.run(step, (a,))


def _second_call_with_a_static_value(s: Any, a: Any) -> Any:
    def step(x: Any, flag: bool) -> Any:
        return x

    s.run(step, (np.zeros(a.shape, a.dtype), True))
    s.run(step, (np.zeros(a.shape, a.dtype), True))
    return s.run(step, (a, True))


def _after_an_array_of_jax(s: Any, a: Any) -> Any:
    def step(x: Any) -> Any:
        return x

    first = jnp.zeros(a.shape, "uint32" if a.dtype == np.uint64 else "int32")
    s.run(step, (first,))
    s.run(step, (first,))
    return s.run(step, (a,))


def _of_a_module(s: Any, a: Any) -> Any:
    return s.run(lambda m: m["ids"][...] + 0, (nnx.Dict(ids=nnx.Variable(a)),))


def _values(a: Any) -> Any:
    return lambda context: a


def _dataset(s: Any, *elements: Any) -> list[Any]:
    return list(s.experimental_distribute_dataset(list(elements)))


def _of_function(s: Any, a: Any) -> Any:
    return s.run(_same, (next(iter(s.distribute_datasets_from_function(lambda _: [a] * 8))),))


def _of_optax(s: Any, a: Any) -> Any:
    return s.run(lambda state: state.count + 0, (optax.ScaleByScheduleState(count=a),))


def _of_an_optimizer(s: Any, a: Any) -> Any:
    optimizer = nnx.Optimizer(nnx.Dict(w=nnx.Param(jnp.ones(2))), optax.sgd(0.1), wrt=nnx.Param)
    optimizer.step.set_value(a)
    return s.run(lambda o: o.step[...] + 0, (optimizer,))


def _restored(s: Any, a: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, training.Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"ids": a})
        restored = checkpoints.restore({"ids": np.zeros(a.shape, a.dtype)})
    assert restored is not None
    found = restored.state
    np.testing.assert_array_equal(found["ids"], a)
    return s.run(_same, (found,))


def _in_a_merge_function(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def merge(s: Any, a: Any) -> Any:
        return s.run(lambda: get_replica_context().merge_call(lambda inner: act(inner, a)))

    return merge


def _updated(s: Any, a: Any) -> Any:
    with s.scope():
        variable = Variable(np.zeros(a.shape, "uint32" if a.dtype == np.uint64 else "int32"))
    s.extended.update(variable, lambda v, x: v.assign_add(x), args=(a,))
    return variable.value()


def _batch_reduced(s: Any, a: Any) -> Any:
    return s.extended.batch_reduce_to("sum", [(_each(s, a), s.extended.worker_devices[0])])


def _assigned(s: Any, a: Any) -> Any:
    with s.scope():
        variable = Variable(np.zeros(a.shape, "uint32" if a.dtype == np.uint64 else "int32"))
    variable.assign(a)
    return variable.value()


def _made(s: Any, a: Any) -> Any:
    with s.scope():
        return Variable(a).value()


Way = Callable[[Any, Any], Any]
WAYS: dict[str, Way] = {
    "run": lambda s, a: s.run(_same, (a,)),
    "run, nested": lambda s, a: s.run(lambda d: d["a"][0], ({"a": [a, 1.0]},)),
    "run, by name": lambda s, a: s.run(lambda *, x: x, (), {"x": a}),
    "run, a scalar": lambda s, a: s.run(_same, (_find_largest(a),)),
    "run of PerReplica": lambda s, a: s.run(_same, (_each(s, a),)),
    "run of uneven rows": lambda s, a: s.run(
        _same, (PerReplica([a[: a.size - n] for n in range(s.num_replicas_in_sync)]),)
    ),
    "run op by op": _op_by_op,
    "run, second call": _second_call,
    "run, second call with a static value": _second_call_with_a_static_value,
    "run, after an array of JAX": _after_an_array_of_jax,
    "run of a module": _of_a_module,
    "function": lambda _, a: jaxdist.function(_same)(a),
    "all_reduce of a constant": lambda s, a: s.run(
        lambda: get_replica_context().all_reduce("sum", a)
    ),
    "reduce": lambda s, a: s.reduce("sum", _each(s, a), axis=None),
    "reduce of rows": lambda s, a: s.reduce("sum", _each(s, a), axis=0),
    "mean of a plain value": lambda s, a: s.reduce("mean", a, axis=None),
    "gather": lambda s, a: s.gather(_each(s, a), axis=0),
    "dataset": lambda s, a: _dataset(s, a),
    "dataset, nested": lambda s, a: _dataset(s, (1 + np.zeros(4), {"ids": a})),
    "dataset, later": lambda s, a: _dataset(s, np.zeros(4, a.dtype), a),
    "dataset of a function": _of_function,
    "values from a function": lambda s, a: s.run(
        _same, (s.experimental_distribute_values_from_function(_values(a)),)
    ),
    "state of optax": _of_optax,
    "state of an optimizer": _of_an_optimizer,
    "a restored value": _restored,
    "the result of a step": lambda s, a: s.run(lambda: {"a": a}),
    "a partial": lambda s, a: s.run(functools.partial(jnp.negative, a)),
    "all_gather of a constant": lambda s, a: s.run(
        lambda: get_replica_context().all_gather(a, axis=0)
    ),
    "reduce in a merge function": _in_a_merge_function(lambda s, a: s.reduce("mean", a, axis=None)),
    "broadcast_to in a merge function": _in_a_merge_function(
        lambda s, a: s.extended.broadcast_to(a, s.extended.worker_devices[0])
    ),
    "batch_reduce_to": _batch_reduced,
    "extended.update": _updated,
    "update_non_slot": lambda s, a: s.extended.update_non_slot(
        s.extended.non_slot_devices([]), _same, args=(a,)
    ),
    "compute_average_loss": lambda s, a: s.run(
        lambda: jaxdist.nn.compute_average_loss(a, global_batch_size=8)
    ),
    "Variable": _made,
    "assign": _assigned,
    "IndexedSlices": lambda s, a: IndexedSlices(np.ones(a.size), a).indices + jnp.int32(0),
    "broadcast_to": lambda s, a: s.extended.broadcast_to(a, s.extended.worker_devices[0]),
    "reduce_to": lambda s, a: s.extended.reduce_to(
        "sum", _each(s, a), s.extended.worker_devices[0]
    ),
    "CrossDeviceOps": lambda s, a: jaxdist.NcclAllReduce().reduce(
        "sum", _each(s, a), [str(d) for d in s.layout.devices]
    ),
    "partition.place": lambda s, a: jaxdist.partition.place(
        s, {"ids": a}, [("ids", jaxdist.partition.Replicate())]
    ),
}
# Without rows: other errors, or nothing to read.
_NEED_ROWS = (
    "dataset",
    "run of uneven rows",
    "reduce of rows",
    "mean of a plain value",
    "a restored value",
)


def _applies(way: str, of: str, kind: str) -> bool:
    if kind == "no elements" and way.startswith(_NEED_ROWS):
        return False
    virtually = of == "2 virtual ones"
    return not (virtually and way in ("run of uneven rows", "run op by op"))


TABLE = [(w, s, a) for w in WAYS for s in STRATEGIES for a in ARRAYS if _applies(w, s, a)]


# The default strategy is one object, which sees a new function in each row.
@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
@pytest.mark.parametrize("row", sampled(TABLE, 130, name=", ".join))
def test_integers_that_do_not_fit_are_an_error(row: tuple[str, str, str]) -> None:
    way, of, kind = row
    array, fits = ARRAYS[kind]
    strategy = STRATEGIES[of]()
    if fits:
        WAYS[way](strategy, array)
        return
    with pytest.raises(JaxdistError, match=f"{array.dtype} with integers from") as raised:
        WAYS[way](strategy, array)
    assert "jax_enable_x64" in str(raised.value)


@pytest.mark.parametrize("way", ["run", "reduce", "gather", "dataset", "Variable", "function"])
def test_with_x64_nothing_is_refused_or_changed(way: str) -> None:
    array, _ = ARRAYS["2**40 + 5"]
    with jax.enable_x64(True):
        got = np.asarray(jax.tree.leaves(WAYS[way](_mirrored(1), array))[0])
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, array)


def test_the_error_names_the_leaf_and_the_ways_out() -> None:
    batch = {"ids": np.array([3, 3_000_000_000]), "x": np.ones(2)}
    with pytest.raises(JaxdistError) as raised:
        _mirrored(2).run(lambda b: b, (batch,))
    text = str(raised.value)
    for part in ("args[0]['ids']", "int64 with integers from 3 to 3000000000", "or uint32"):
        assert part in text
    with pytest.raises(JaxdistError, match=r"element 1 of the dataset was given batch\['ids'\]"):
        _dataset(_mirrored(2), {"ids": np.array([1, 2])}, {"ids": np.array([1, 2**40])})


def test_a_float_variable_takes_large_integers() -> None:
    variable = Variable(np.zeros(2, np.float32))
    variable.assign(np.array([2**40, 1]))
    assert variable.numpy().tolist() == [2.0**40, 1.0]
