"""A JAX trace that passes every operation to a handler, and its tracers: concrete arrays."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax.sharding import AbstractMesh, NamedSharding

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class HeldTracer(_core.Tracer[Any]):
    """A concrete array of one replica, with a mark that names its origin.

    It is a tracer because JAX treats every concrete operand of `jax.lax.psum` as a constant. In
    every other respect it behaves like the array that it holds.
    """

    __slots__ = ("held", "mark")

    def __init__(self, trace: Any, held: Any, mark: Any) -> None:
        super().__init__(trace, _core.typeof(held))
        self.held = held
        self.mark = mark

    def is_of(self, trace: Any) -> bool:
        return self._trace is trace

    def to_concrete_value(self) -> Any:
        self.mark.is_read = True
        return self.held

    def full_lower(self) -> "HeldTracer":
        return self

    def block_until_ready(self) -> "HeldTracer":
        self.held.block_until_ready()
        return self


def _forward_to_held(name: str) -> property:
    return property(lambda self: _read(self, name))


def _read(tracer: HeldTracer, name: str) -> Any:
    # A representation decides nothing; messages read it.
    tracer.mark.is_read = tracer.mark.is_read or name in _READS
    return getattr(tracer.held, name)


_READS = frozenset({"item", "tobytes", "tolist", "__array__", "__complex__", "__float__"})


# JAX raises an error for most of these members of a tracer; a concrete array has them.
for _name in (
    "addressable_data addressable_shards committed copy_to_host_async device devices format "
    "global_shards is_deleted is_fully_addressable is_fully_replicated item "
    "on_device_size_in_bytes sharding tobytes tolist unsafe_buffer_pointer __array__ __complex__ "
    "__dlpack__ __dlpack_device__ __float__ __format__ __reduce__ __repr__ __str__"
).split():
    setattr(HeldTracer, _name, _forward_to_held(_name))


class _OpByOp(_core.Trace):
    """A trace that calls a handler for each operation."""

    __slots__ = ("_handler", "_stage")

    def __init__(self, handler: Handler, stage: Callable[[Any], Any]) -> None:
        super().__init__()
        self._handler = handler
        self._stage = stage

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, HeldTracer) else self._stage(val)

    def cur_qdd(self, x: Any) -> Any:
        return x.cur_qdd()

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        # The handler computes with JAX; under this trace its operations would return here.
        with _core.set_current_trace(_core.eval_trace):
            return self._handler(primitive, args, params)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        with _core.set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_shard_map(self, primitive: Any, *args: Any, **params: Any) -> Any:
        return self.process_primitive(primitive, args, params)

    # Under `jax.grad` JAX applies the custom rule before the call reaches this trace. So a custom
    # function that arrives here is not differentiated, and its body alone is enough.
    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any
    ) -> Any:
        with _core.set_current_trace(self):
            return fun.call_wrapped(*tracers)


@contextlib.contextmanager
def op_by_op(
    handler: Handler,
    stage: Callable[[Any], Any],
    axis_sizes: Sequence[tuple[str, int]],
    mesh: jax.sharding.Mesh,
) -> Iterator[Any]:
    """Pass every operation of the block to `handler`; yield the trace, for `HeldTracer`.

    `stage` makes a `HeldTracer` of a host value that becomes an array (`jnp.asarray(2.0)`).

    Transformations (`jax.grad`, `jax.vmap`) work as they do outside of `jit`. The handler also
    gets collectives over the axes. Sharding constraints may name `mesh`. Waits for a public way to
    write an interpreter for which JAX does not have to trace its own control flow.
    """
    trace = _OpByOp(handler, stage)
    with (
        _core.set_current_trace(trace),
        _core.extend_axis_env_nd(list(axis_sizes)),
        _config.disable_jit(True),
        _mesh.use_abstract_mesh(mesh.abstract_mesh),
    ):
        yield trace


def call_in_trace(trace: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` under `trace`."""
    with _core.set_current_trace(trace):
        return fn(*args)


def call_outside_traces(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` outside of every trace and `shard_map` of the caller."""
    with contextlib.ExitStack() as around:
        around.enter_context(_core.set_current_trace(_core.eval_trace))
        around.enter_context(_config.disable_jit(False))
        if jax.sharding.get_abstract_mesh().manual_axes:
            around.enter_context(_mesh.use_abstract_mesh(_mesh.empty_abstract_mesh))
        return fn(*args)


def evaluate(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Compute one operation on concrete arrays, as JAX does outside of `jit`.

    The types of the results contain no mesh. The results are on one device, and JAX caches compiled
    operations by shapes and devices only. With a mesh, the results would get the mesh of the
    strategy that first computed this operation.
    """
    # Rules of JAX for gradients give the type of another array as the `sharding` of a result.
    params = {k: None if _is_of_a_type(v) else v for k, v in params.items()}
    with _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh):
        return _core.eval_trace.process_primitive(primitive, args, params)


def _is_of_a_type(param: Any) -> bool:
    """Whether a parameter is a sharding of a type, without an axis that it could split."""
    if not isinstance(param, NamedSharding) or not isinstance(param.mesh, AbstractMesh):
        return False
    return not param.mesh.explicit_axes
