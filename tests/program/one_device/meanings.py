"""What a random program means: on one device, in parts on one device, and on replicas.

The first two are plain JAX. The second computes the same rows in parts, with `jax.vmap` and an axis
name; how far it is from the first is how much the numbers of a program depend on the order of sums.
"""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import partition
from tests.program.one_device.sources import Program


@jax.custom_vjp
def halved(x: Any) -> Any:
    """An operation with a rule of its own."""
    return x * 0.5


halved.defvjp(lambda x: (x * 0.5, x), lambda x, g: (g * 0.5 + 0 * x,))


class OneDevice:
    """All rows are here, so nothing is reduced."""

    axis: Any = None

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    def sum(self, tree: Any) -> Any:
        return jax.tree.map(jnp.asarray, tree)

    def max(self, x: Any) -> Any:
        return x

    def gather(self, x: Any) -> Any:
        return x

    def own(self, grads: Any) -> Any:
        """Gradients that the optimizer reduces."""
        return grads

    def whole(self, tree: Any) -> Any:
        return tree


class InParts(OneDevice):
    """Parts of the rows, along an axis of `jax.vmap`."""

    axis = "parts"

    def sum(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.psum(jnp.asarray(x), self.axis), tree)

    def max(self, x: Any) -> Any:
        return lax.pmax(x, self.axis)

    def gather(self, x: Any) -> Any:
        return lax.all_gather(x, self.axis, tiled=True)

    def own(self, grads: Any) -> Any:
        return self.sum(grads)


class OnReplicas(OneDevice):
    """The replicas of a strategy."""

    def __init__(self, tx: Any, strategy: Any, axes: Any) -> None:
        super().__init__(tx)
        self.strategy = strategy
        self.axis = axes

    def sum(self, tree: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", tree)

    def max(self, x: Any) -> Any:
        return lax.pmax(x, self.axis)

    def gather(self, x: Any) -> Any:
        return jaxdist.get_replica_context().all_gather(x, axis=0)

    def whole(self, tree: Any) -> Any:
        return partition.gather(tree)


def names(program: Program, moved: int = 0) -> dict[str, Any]:
    """Run the source of a program, and return what it defines.

    Args:
        program: The program.
        moved: A seed, to move each number by one step of its dtype; zero moves none.
    """
    dtype = jnp.dtype(program.dtype)

    def rand(seed: int, *shape: int) -> Any:
        values = np.random.default_rng([program.number, seed]).normal(size=shape)
        return jnp.asarray(_move((values / np.sqrt(shape[0])).astype(dtype), moved, seed))

    found: dict[str, Any] = {
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "nnx": nnx,
        "optax": optax,
        "rand": rand,
        "halved": halved,
        "vector": lambda i: rand(10 + i, 4) * 2,
        "matrix": lambda i: rand(20 + i, 4, 4),
        "TX": optax.identity(),
    }
    exec(compile(program.source, f"<program {program.number}>", "exec"), found)
    return found


def data(program: Program, step: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a step, and their labels."""
    rng = np.random.default_rng([program.number, 100 + step])
    count = sum(program.rows)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return np.asarray(x, jnp.dtype(program.dtype)), rng.integers(0, 4, count).astype(np.int32)


def _move(x: np.ndarray, moved: int, *seed: int) -> np.ndarray:
    """Return numbers, each moved by one step of its dtype, up or down."""
    if not moved:
        return x
    up = np.random.default_rng([moved, *seed]).integers(0, 2, x.shape) * 2 - 1
    return np.nextafter(x, np.asarray(up * np.inf, x.dtype))


def split(x: np.ndarray, rows: tuple[int, ...]) -> list[np.ndarray]:
    ends = np.cumsum((0, *rows))
    return [x[a:b] for a, b in itertools.pairwise(ends)]


def _started(program: Program, found: dict[str, Any], c: Any) -> Any:
    start = found["start"](c)
    if program.kind == "rows":
        return ()
    if program.kind == "pytree":
        return start, found["TX"].init(start)
    if program.dtype != "float32":
        _cast(start, program.dtype)
    return start, nnx.Optimizer(start, found["TX"], wrt=nnx.Param)


def _cast(model: Any, dtype: str) -> None:
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p: p.astype(dtype), state))


# The numbers of each step: the state after it, results that have rows, and those that are equal.
Numbers = list[tuple[Any, Any, Any]]


def with_other_roundings(program: Program) -> list[Numbers]:
    """Run the program in plain JAX as XLA optimizes it, without XLA's optimizations, op by op."""
    found = [on_one_device(program, compiled=False)]
    option = "jax_disable_most_optimizations"
    before = jax.config.read(option)
    try:
        for disabled in (False, True):
            jax.config.update(option, disabled)
            found.append(on_one_device(program))
    finally:
        jax.config.update(option, before)
    return found


def on_one_device(program: Program, *, compiled: bool = True, moved: int = 0) -> Numbers:
    """Run the program in plain JAX, with all rows; `moved` is that of `names`."""
    found = names(program, moved)
    c = OneDevice(found["TX"])
    graph, state = nnx.split(_started(program, found, c))

    def step(state: Any, x: Any, y: Any) -> Any:
        after, rows, equal = found["step"](c, nnx.merge(graph, state), x, y)
        return nnx.split(after)[1], rows, equal

    run = jax.jit(step) if compiled else step
    numbers: Numbers = []
    for i in range(program.steps):
        x, y = data(program, i)
        state, rows, equal = run(state, _move(x, moved, 100 + i), y)
        numbers.append(_fetched((_visible(program, nnx.merge(graph, state)), rows, equal)))
    return numbers


def in_parts(program: Program, parts: int) -> Numbers:
    """Run the program in plain JAX, with the rows in `parts` equal parts."""
    found = names(program)
    c = InParts(found["TX"])
    graph, state = nnx.split(_started(program, found, c))

    def step(state: Any, x: Any, y: Any) -> Any:
        after, rows, equal = found["step"](c, nnx.merge(graph, state), x, y)
        return nnx.split(after)[1], rows, equal

    stepped = jax.jit(jax.vmap(step, in_axes=(None, 0, 0), axis_name="parts"))
    numbers: Numbers = []
    for i in range(program.steps):
        x, y = data(program, i)
        states, rows, equal = stepped(state, x.reshape(parts, -1, 4), y.reshape(parts, -1))
        state, equal = jax.tree.map(lambda a: a[0], (states, equal))
        visible = _visible(program, nnx.merge(graph, state))
        numbers.append(_fetched((visible, jax.tree.map(_joined, rows), equal)))
    return numbers


def _joined(a: Any) -> Any:
    return a.reshape(-1, *a.shape[2:])


def make_strategy(program: Program) -> tuple[Any, Any]:
    """Return the strategy of a program, and the names of its replica axes."""
    count = len(program.rows)
    if program.strategy == "two axes":
        mesh = _mesh((2, count // 2), ("slice", "data"))
        return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("slice", "data")), (
            "slice",
            "data",
        )
    if program.strategy == "grid":
        mesh = _mesh((count, 2), ("data", "model"))
        return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",)), "data"
    devices = [f"cpu:{i}" for i in range(count)]
    if program.strategy == "virtual":
        return jaxdist.MirroredStrategy(devices[: count // 2], deterministic=count), "replica"
    return jaxdist.MirroredStrategy(devices), "replica"


def _mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(shape))], dtype=object).reshape(shape)
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))


def on_replicas(program: Program, *, op_by_op: bool) -> Numbers:
    """Run the program with jaxdist, compiled or op by op.

    Op by op takes most of the time, so three of four programs run one step there.
    """
    found = names(program)
    strategy, axes = make_strategy(program)
    if "sharded_update" in program.features:
        op = "sum" if program.placement == "zero" else "mean"
        found["TX"] = jaxdist.sharded_update(found["TX"], reduce_op=op, min_bytes=0)
    c = OnReplicas(found["TX"], strategy, axes)

    def step(state: Any, x: Any, y: Any) -> Any:
        after, rows, equal = found["step"](c, state, x, y)
        # Modules are changed in place.
        return None if program.kind == "module" else after, rows, equal

    numbers: Numbers = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", jaxdist.errors.RetraceWarning)
        stack.enter_context(jaxdist.config.run_eagerly(op_by_op))
        state = _placed(program, found, c)
        for i in range(1 if op_by_op and program.number % 4 else program.steps):
            x, y = (_distributed(program, strategy, a) for a in data(program, i))
            after, rows, equal = strategy.run(step, (state, x, y))
            state = state if program.kind == "module" else after
            numbers.append(_fetched((_visible(program, state), rows, equal)))
    return numbers


def _distributed(program: Program, strategy: Any, x: np.ndarray) -> Any:
    if program.is_even and program.number % 2:
        return jax.device_put(x, strategy.per_replica_sharding)
    return jaxdist.PerReplica(split(x, program.rows))


def _placed(program: Program, found: dict[str, Any], c: OnReplicas) -> Any:
    rules = {
        "fsdp": partition.fsdp(min_bytes=0),
        "hsdp": partition.fsdp(min_bytes=0, axes=("data",)),
    }.get(program.placement)
    # The ready rules of tensor parallelism are for models with their names.
    if program.strategy == "grid" and program.features & {"model mlp", "module mlp"}:
        rules = (
            partition.fsdp_tensor_parallel(min_bytes=0) if rules else partition.tensor_parallel()
        )
    with c.strategy.scope():
        if rules is None or program.kind == "rows":
            return _started(program, found, c)
        if program.number % 3:
            return partition.place(c.strategy, _started(program, found, c), rules)
        # The optimizer after its model.
        start = found["start"](c)
        if program.kind == "pytree":
            start = partition.place(c.strategy, start, rules)
            return start, found["TX"].init(start)
        if program.dtype != "float32":
            _cast(start, program.dtype)
        partition.place(c.strategy, start, rules)
        return start, nnx.Optimizer(start, found["TX"], wrt=nnx.Param)


def _visible(program: Program, state: Any) -> dict[str, Any]:
    """What a user sees of the state, by name: parameters, statistics, the optimizer's state."""
    if program.kind == "rows":
        return {}
    if program.kind == "pytree":
        # Its form belongs to `sharded_update`.
        seen = state[0] if "sharded_update" in program.features else state
        flat = jax.tree.flatten_with_path(seen, is_leaf=lambda x: isinstance(x, jaxdist.Sharded))
        first = "[0]" if seen is state[0] else ""
        return {first + jax.tree_util.keystr(path): leaf for path, leaf in flat[0]}
    flat = nnx.to_flat_state(nnx.state(state[0], (nnx.Param, nnx.BatchStat)))
    return {"/".join(map(str, path)): v.get_raw_value() for path, v in flat}


def _fetched(tree: Any) -> Any:
    """Arrays of NumPy, and `PerReplica` values as lists of them."""

    def fetch(x: Any) -> Any:
        if isinstance(x, jaxdist.PerReplica):
            return [np.asarray(v) for v in x.values]
        if isinstance(x, jaxdist.Sharded):
            return np.asarray(x.whole())
        return np.asarray(x)

    kinds = (jaxdist.PerReplica, jaxdist.Sharded)
    return jax.tree.map(fetch, tree, is_leaf=lambda x: isinstance(x, kinds))


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Rows and vectors are combined without dims of 1, as users do."""
    before = jax.config.values["jax_numpy_rank_promotion"]
    jax.config.update("jax_numpy_rank_promotion", "allow")
    try:
        yield
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)
