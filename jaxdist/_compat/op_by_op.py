"""A JAX trace that passes every operation to a handler."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax.sharding import AbstractMesh, NamedSharding

from jaxdist._compat.held_tracer import HeldTracer

Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


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
