"""jaxdist keeps copies of its own: callers may overwrite their arrays after any call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse

import jaxdist
from jaxdist import IndexedSlices, PerReplica, Sharded, Variable, partition
from jaxdist._values import allocate_aligned, copy_if_writable, copy_writable_leaves
from tests.tables import sampled

_ROWS, _COLUMNS = 64, 16
_BEFORE, _AFTER = 1.0, 99.0

_STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": jaxdist.get_strategy,
    "one_device": lambda: jaxdist.OneDeviceStrategy("cpu:1"),
    "mirrored_4": lambda: jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "virtual_4_on_2": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4),
}


def _buffer() -> np.ndarray:
    """An array that CPU devices use without a copy, as a whole and in eight pieces."""
    buffer = allocate_aligned((_ROWS, _COLUMNS), np.dtype("float32"))
    buffer[...] = _BEFORE
    return buffer


def _pieces(strategy: Any, buffer: np.ndarray) -> list[np.ndarray]:
    return np.split(buffer, strategy.num_replicas_in_sync)


def _slices(buffer: np.ndarray) -> IndexedSlices:
    return IndexedSlices(buffer, np.arange(_ROWS), dense_shape=buffer.shape)


def _variable(strategy: Any, value: Any, **options: Any) -> Variable:
    with strategy.scope():
        return Variable(value, **options)


def _zeros(strategy: Any, **options: Any) -> Variable:
    return _variable(strategy, jnp.zeros((_ROWS, _COLUMNS)), **options)


ON_READ = jaxdist.VariableSynchronization.ON_READ
MEAN = jaxdist.VariableAggregation.MEAN
Way = Callable[[Any, np.ndarray], Any]

WAYS: dict[str, Way] = {}


def _way(name: str) -> Callable[[Way], Way]:
    def add(fn: Way) -> Way:
        WAYS[name] = fn
        return fn

    return add


# Variables.

WAYS["Variable"] = lambda s, a: _variable(s, a)
WAYS["Variable of a function"] = lambda s, a: _variable(s, lambda: a)
WAYS["Variable with a dtype"] = lambda s, a: _variable(s, a, dtype="float32")
WAYS["Variable ON_READ"] = lambda s, a: _variable(s, a, synchronization=ON_READ, aggregation=MEAN)
WAYS["Variable outside"] = lambda s, a: Variable(a)


@_way("assign")
def _assign(s: Any, a: np.ndarray) -> Any:
    v = _zeros(s)
    v.assign(a)
    return v


@_way("assign what it returns")
def _assign_returned(s: Any, a: np.ndarray) -> Any:
    return _zeros(s).assign(a)


@_way("assign_add")
def _assign_add(s: Any, a: np.ndarray) -> Any:
    return _zeros(s).assign_add(a)


@_way("assign_sub")
def _assign_sub(s: Any, a: np.ndarray) -> Any:
    return -_zeros(s).assign_sub(a)


@_way("assign outside")
def _assign_outside(s: Any, a: np.ndarray) -> Any:
    return Variable(jnp.zeros(a.shape)).assign(a)


@_way("assign ON_READ")
def _assign_on_read(s: Any, a: np.ndarray) -> Any:
    v = _zeros(s, synchronization=ON_READ, aggregation=MEAN)
    v.assign(a, read_value=False)
    return v.read_value()


@_way("assign a PerReplica")
def _assign_per_replica(s: Any, a: np.ndarray) -> Any:
    if s.num_replicas_in_sync == 1:
        return _zeros(s).assign(a)
    v = _zeros(s, synchronization=ON_READ, aggregation=MEAN)
    v.assign(PerReplica([a] * s.num_replicas_in_sync))
    return v.values


@_way("scatter_update")
def _scatter_update(s: Any, a: np.ndarray) -> Any:
    return _zeros(s).scatter_update(_slices(a))


@_way("scatter_add of a BCOO")
def _scatter_bcoo(s: Any, a: np.ndarray) -> Any:
    parts: Any = (a, np.arange(_ROWS)[:, None])
    rows = sparse.BCOO(parts, shape=a.shape)
    return _zeros(s).scatter_add(rows)


@_way("extended.update")
def _update(s: Any, a: np.ndarray) -> Any:
    v = _zeros(s)
    s.extended.update(v, lambda var, x: var.assign(x), args=(a,))
    return v


@_way("deepcopy of a tree")
def _loaded(s: Any, a: np.ndarray) -> Any:
    tree = {"v": _zeros(s)}
    jax.tree.map(Variable.assign, tree, {"v": a}, is_leaf=lambda x: isinstance(x, Variable))
    return tree["v"]


# Values of replicas.

WAYS["PerReplica"] = lambda s, a: PerReplica(_pieces(s, a))
WAYS["PerReplica of lists"] = lambda s, a: PerReplica([_List(p) for p in _pieces(s, a)])
WAYS["IndexedSlices"] = lambda s, a: _slices(a).values


class _List(list[Any]):
    """A list that is overwritten when its array is."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array.tolist())
        _overwritten_too.append(self)


_overwritten_too: list[Any] = []


@_way("experimental_distribute_values_from_function")
def _from_function(s: Any, a: np.ndarray) -> Any:
    pieces = _pieces(s, a)
    return s.experimental_distribute_values_from_function(
        lambda ctx: pieces[ctx.replica_id_in_sync_group]
    )


@_way("values of different rows")
def _uneven_values(s: Any, a: np.ndarray) -> Any:
    return s.experimental_distribute_values_from_function(
        lambda ctx: a[: 16 * (1 + ctx.replica_id_in_sync_group)]
    )


def _is_all(s: Any, value: Any) -> Any:
    """A step whose work on `value` starts late; then what it saw."""
    slow = jax.lax.fori_loop(0, 60, lambda i, x: jnp.tanh(x @ x), jnp.zeros((300, 300)))
    return jax.tree.map(lambda x: x + slow[0, 0], value)


@_way("run")
def _run(s: Any, a: np.ndarray) -> Any:
    return s.run(lambda x: _is_all(s, x), (a,))


@_way("run by name")
def _run_by_name(s: Any, a: np.ndarray) -> Any:
    return s.run(lambda x: _is_all(s, x), kwargs={"x": a})


@_way("run again")
def _run_again(s: Any, a: np.ndarray) -> Any:
    step = lambda x: _is_all(s, x)  # noqa: E731
    jax.block_until_ready([s.run(step, (a,)) for _ in range(3)])
    return s.run(step, (a,))


@_way("run after arrays of JAX")
def _run_after_arrays(s: Any, a: np.ndarray) -> Any:
    step = lambda x: _is_all(s, x)  # noqa: E731
    jax.block_until_ready([s.run(step, (jnp.array(a),)) for _ in range(3)])
    jax.block_until_ready(s.run(step, (a,)))
    return s.run(step, (a,))


@_way("run with a static argument")
def _run_static(s: Any, a: np.ndarray) -> Any:
    step = lambda how, x: _is_all(s, x)  # noqa: E731
    jax.block_until_ready([s.run(step, ("a", a)) for _ in range(3)])
    return s.run(step, ("a", a))


@_way("run with a variable")
def _run_variable(s: Any, a: np.ndarray) -> Any:
    v = _zeros(s)

    def step(x: Any) -> Any:
        v.assign(_is_all(s, x))

    for _ in range(3):
        s.run(step, (a,))
    return v


@_way("run that donates")
def _run_donates(s: Any, a: np.ndarray) -> Any:
    options = jaxdist.RunOptions(donate_argnums=(0,))
    step = lambda x: _is_all(s, x)  # noqa: E731
    jax.block_until_ready([s.run(step, (a,), options=options) for _ in range(3)])
    return s.run(step, (a,), options=options)


@_way("run with a PerReplica")
def _run_per_replica(s: Any, a: np.ndarray) -> Any:
    step = lambda x: _is_all(s, x)  # noqa: E731
    jax.block_until_ready([s.run(step, (PerReplica(_pieces(s, a)),)) for _ in range(2)])
    return s.run(step, (PerReplica(_pieces(s, a)),))


@_way("run with a global PerReplica")
def _run_of_global(s: Any, a: np.ndarray) -> Any:
    return s.run(lambda x: _is_all(s, x), (PerReplica.of_global(a),))


@_way("run with uneven rows")
def _run_uneven(s: Any, a: np.ndarray) -> Any:
    rows = [a[: 16 * (1 + i % 2)] for i in range(s.num_replicas_in_sync)]
    return s.run(lambda x: _is_all(s, x), (PerReplica(rows),))


@_way("run with a Sharded")
def _run_sharded(s: Any, a: np.ndarray) -> Any:
    return s.run(lambda x: _is_all(s, x), (Sharded(a, 0, _ROWS),))


@_way("run with an NNX object")
def _run_nnx(s: Any, a: np.ndarray) -> Any:
    model = nnx.Dict(w=nnx.Param(a))
    return s.run(lambda m: _is_all(s, m["w"][...]), (model,))


@_way("run of what comes back as it is")
def _run_identity(s: Any, a: np.ndarray) -> Any:
    return s.run(lambda x: x, (a,))


@_way("run op by op")
def _run_op_by_op(s: Any, a: np.ndarray) -> Any:
    with jaxdist.config.run_eagerly(True):
        return s.run(lambda x: (x, x + 0), (a,))


@_way("run closes over it")
def _run_closure(s: Any, a: np.ndarray) -> Any:
    def step() -> Any:
        return _is_all(s, jnp.asarray(a)), a

    s.run(step)
    return s.run(step)


@_way("compiled program that closes over it")
def _lowered_closure(s: Any, a: np.ndarray) -> Any:
    program = s.lower(lambda: (a * 1, a))
    return _Later(lambda: program.compiled()())


@_way("run by extended")
def _call_for_each(s: Any, a: np.ndarray) -> Any:
    return s.extended.call_for_each_replica(lambda x: _is_all(s, x), args=(a,))


@_way("a step's constant")
def _constant(s: Any, a: np.ndarray) -> Any:
    step = lambda: a + 0  # noqa: E731
    s.run(step)
    s.run(step)
    return _Later(lambda: s.run(step))


# Whole functions.


@_way("function")
def _function(s: Any, a: np.ndarray) -> Any:
    f = jaxdist.function(lambda x: _is_all(s, x))
    jax.block_until_ready([f(a) for _ in range(2)])
    return f(a)


@_way("function by name")
def _function_by_name(s: Any, a: np.ndarray) -> Any:
    f = jaxdist.function(lambda x: s.run(lambda y: _is_all(s, y), (x,)))
    return f(x=a)


@_way("function's constant")
def _function_constant(s: Any, a: np.ndarray) -> Any:
    f = jaxdist.function(lambda: jnp.asarray(a) + 0)
    f()
    return _Later(f)


# Reducing, gathering, sending. (The mean of an undistributed value is the caller's own object.)

WAYS["reduce over a dim"] = lambda s, a: s.reduce("MEAN", a, axis=0)
WAYS["reduce a PerReplica"] = lambda s, a: s.reduce("MEAN", PerReplica(_pieces(s, a)), axis=None)
WAYS["reduce_to"] = lambda s, a: s.extended.reduce_to("MEAN", a, "cpu:1")
WAYS["batch_reduce_to"] = lambda s, a: s.extended.batch_reduce_to("MEAN", [(a, "cpu:1")])
WAYS["gather"] = lambda s, a: s.gather(PerReplica(_pieces(s, a)), axis=0)
WAYS["broadcast_to"] = lambda s, a: s.extended.broadcast_to(a, "cpu:1")
WAYS["broadcast_to all"] = lambda s, a: s.extended.broadcast_to(
    a, PerReplica([0] * s.num_replicas_in_sync)
)


for _ops in (
    jaxdist.ReductionToOneDevice(),
    jaxdist.NcclAllReduce(),
    jaxdist.HierarchicalCopyAllReduce(),
):
    _name = type(_ops).__name__
    WAYS[f"{_name}.broadcast"] = lambda s, a, ops=_ops: ops.broadcast(a, "cpu:1")
    WAYS[f"{_name}.reduce"] = lambda s, a, ops=_ops: ops.reduce("MEAN", PerReplica([a]), "cpu:1")


# Placing.

_RULES = partition.Rules([], otherwise=partition.Split(0))
_ALIKE = partition.Rules([], otherwise=partition.Replicate())
WAYS["partition.place replicated"] = lambda s, a: partition.place(s, {"w": a}, _ALIKE)
WAYS["partition.place split"] = lambda s, a: partition.place(s, {"w": a}, _RULES)
WAYS["shard_state"] = lambda s, a: jaxdist.shard_state({"w": a}, s)


# Datasets.


@_way("experimental_distribute_dataset")
def _dataset(s: Any, a: np.ndarray) -> Any:
    return next(iter(s.experimental_distribute_dataset([a])))


@_way("distribute_datasets_from_function")
def _dataset_fn(s: Any, a: np.ndarray) -> Any:
    pieces = _pieces(s, a)
    return next(iter(s.distribute_datasets_from_function(lambda _: pieces)))


@_way("dataset of a source that reuses its buffer")
def _reused(s: Any, a: np.ndarray) -> Any:
    def source() -> Any:
        for _ in range(3):
            yield a
            a[...] = _AFTER

    return next(iter(s.experimental_distribute_dataset(source())))


@_way("batches")
def _batches(s: Any, a: np.ndarray) -> Any:
    batches = jaxdist.data.batches(a, batch_size=_ROWS)
    return next(iter(s.experimental_distribute_dataset(batches)))


class _Later:
    """A value that is computed only after the buffer was overwritten."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.compute = compute


def _numbers(value: Any) -> list[np.ndarray]:
    if isinstance(value, _Later):
        return _numbers(value.compute())
    if isinstance(value, Variable):
        return [np.asarray(value.read_value())]
    return [np.asarray(x) for x in jax.tree.leaves(value)]


# Ways that strategies with virtual replicas refuse.
_NOT_VIRTUAL = {"run with uneven rows", "run op by op", "values of different rows"}
# The default strategy returns the elements of a dataset unchanged.
_NOT_DEFAULT = {n for n in WAYS if "dataset" in n}
_LEFT_OUT = {"virtual_4_on_2": _NOT_VIRTUAL, "default": _NOT_DEFAULT}
_TABLE = [
    (strategy, way)
    for way in WAYS
    for strategy in _STRATEGIES
    if way not in _LEFT_OUT.get(strategy, ())
]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("row", sampled(_TABLE, 40, name=lambda r: f"{r[1]}-{r[0]}"))
def test_what_the_library_keeps_does_not_change_with_the_callers_array(
    row: tuple[str, str],
) -> None:
    strategy, way = row
    buffer = _buffer()
    _overwritten_too.clear()
    kept = WAYS[way](_STRATEGIES[strategy](), buffer)
    buffer[...] = _AFTER
    for other in _overwritten_too:
        other[:] = buffer.tolist()
    for numbers in _numbers(kept):
        assert not (numbers == _AFTER).any()


@pytest.mark.parametrize("name", _STRATEGIES)
def test_a_view_of_a_variable_or_of_state_keeps_its_numbers(name: str) -> None:
    strategy = _STRATEGIES[name]()
    v = _variable(strategy, jnp.ones((_ROWS, _COLUMNS)))
    w = jax.device_put(np.ones((_ROWS, _COLUMNS), np.float32), strategy.replicated_sharding)

    def step(state: Any) -> Any:
        v.assign_add(jnp.ones_like(state))
        return state + 1

    w = strategy.run(step, (w,))
    views = [v.numpy(), np.asarray(v), np.asarray(v.read_value()), np.asarray(w)]
    views += [np.asarray(x) for x in (*v.values, *strategy.experimental_local_results(w))]
    options = jaxdist.RunOptions(donate_argnums=(0,))
    for _ in range(3):
        w = strategy.run(step, (w,), options=options)
    v.assign_add(jnp.ones(v.shape))
    v.assign(jnp.zeros(v.shape))
    jax.block_until_ready(w)
    assert all((view == 2).all() for view in views)


@pytest.mark.parametrize("kind", ["array", "dict", "view"])
def test_one_array_that_a_function_of_values_fills_again_is_a_value_of_each_replica(
    kind: str,
) -> None:
    buffer = np.zeros((2, 3), np.float32)
    held = {"x": buffer}

    def value_fn(context: Any) -> Any:
        buffer[:] = context.replica_id_in_sync_group
        return held if kind == "dict" else buffer[:1] if kind == "view" else buffer

    strategy = _STRATEGIES["mirrored_4"]()
    values = strategy.experimental_distribute_values_from_function(value_fn)
    leaf = values["x"] if kind == "dict" else values
    assert [float(np.asarray(v)[0, 0]) for v in leaf.values] == [0, 1, 2, 3]


def test_what_nobody_can_write_to_is_not_copied() -> None:
    buffer = _buffer()
    once = copy_if_writable(buffer)
    assert once is not buffer
    assert copy_if_writable(once) is once
    readonly = buffer.view()
    readonly.flags.writeable = False
    assert copy_if_writable(readonly) is not readonly, "it can be written to as `buffer`"
    array = jnp.ones(3)
    assert copy_if_writable(array) is array
    assert copy_writable_leaves({"a": array, "b": 2})["a"] is array


@pytest.mark.parametrize("array", [np.ma.masked_array([1.0]), np.array([None]), np.array(["a"])])
def test_what_jax_refuses_stays_what_it_is(array: np.ndarray) -> None:
    assert copy_if_writable(array) is array


def test_room_for_objects_is_made_of_references_not_of_raw_bytes() -> None:
    assert allocate_aligned((2,), np.dtype(object)).tolist() == [None, None]
