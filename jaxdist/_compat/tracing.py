"""The trace of the caller, and the variables of its context."""

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching

T = TypeVar("T")

# These traces run a function immediately, operation by operation; they do not stage it.
_RUNNING = (_ad.JVPTrace, _ad.LinearizeTrace, _batching.BatchTrace)


def is_inside_trace() -> bool:
    """Whether a JAX transformation is tracing the caller. Waits for a public name."""
    return not _core.trace_state_clean()


def must_interpret() -> bool:
    """Whether compiled programs cannot be called here: inside a trace, or without `jit`."""
    return is_inside_trace() or is_jit_disabled()


def get_current_trace() -> Any:
    """Return the innermost trace of the caller, which is compared by identity.

    Waits for a stable public name: `get_opaque_trace_state` moves between 0.10 and 0.12.
    """
    return _core.trace_ctx.trace


def is_live(tracer: Any) -> bool:
    """Whether a traced value belongs to a trace of the caller.

    Waits for JAX to answer it for `jit`: there `is_valid` is always true.
    """
    return any(trace is tracer._trace for trace in _list_traces())


def _list_traces() -> Iterator[Any]:
    """Yield the traces of the caller, the innermost first."""
    trace = get_current_trace()
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def is_staged_in(outer: Any) -> bool:
    """Whether the caller is in a nested program (a loop, a branch, a `jit`) inside `outer`.

    `jax.grad` and `jax.vmap` make no nested program: their function runs once, in the same program.
    """
    trace = _core.trace_ctx.trace
    while trace is not outer and isinstance(trace, _RUNNING):
        trace = trace.parent_trace
    return trace is not outer


def find_mapped_axis(names: Collection[str]) -> str | None:
    """Return the one of these axis names that a `jax.vmap` around the caller uses as its own.

    A collective over this name is one over the mapped values there. Waits for a public way to tell
    the axes of a mesh from those of `vmap`.
    """
    for trace in _list_traces():
        name = trace.axis_data.name if isinstance(trace, _batching.BatchTrace) else None
        if isinstance(name, str) and name in names:
            return name
    return None


def is_staged() -> bool:
    """Whether the caller is in a function that JAX turns into a program (`jit`, loops, branches).

    `jax.grad` and `jax.vmap` outside of `jit` run their function at once.
    """
    return is_staged_in(_core.eval_trace)


def is_jit_disabled() -> bool:
    """Whether the caller is under `jax.disable_jit()`."""
    return _config.disable_jit.value


@contextlib.contextmanager
def typed_like(tracers: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Let traced values have the types of others meanwhile, and so be used where these are.

    JAX refuses a value in a `jax.shard_map` that a function has from around it: the mesh of its
    type has other axes that are manual. Waits for JAX to accept such values.
    """
    before = [tracer.aval for tracer in tracers]
    try:
        for tracer, value, aval in zip(tracers, values, before, strict=True):
            tracer.aval = _core.typeof(value).update(weak_type=aval.weak_type)
        yield
    finally:
        for tracer, aval in zip(tracers, before, strict=True):
            tracer.aval = aval


def is_mapped(value: Any) -> bool:
    """Whether `jax.vmap` maps over the value. Waits for a public name."""
    return isinstance(value, _batching.BatchTracer)


def enable_jit() -> Any:
    """Return a context in which `jit` compiles, even inside `op_by_op` or `jax.disable_jit()`."""
    return _config.disable_jit(False)


@contextlib.contextmanager
def set_in_block(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable in the block, and restore it afterwards.

    Python 3.14: the token that `ContextVar.set` returns is such a context manager itself.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_FRAMES = 4  # from the flattening function of a node up to that of the Jacobian


def find_calling_jacobian() -> str | None:
    """Return `jacrev` or `jacfwd` if it is flattening its arguments, else None.

    A pytree node calls this in its flatten function. Both put arrays into the structure of the
    arguments, and then expect nodes of the same type. Waits for JAX to explain it in its own error.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_back
        if found is None:
            return None
        frame = found
        if frame.f_code.co_name == "jacfun":
            return frame.f_code.co_qualname.partition(".")[0]
    return None


def list_modules_of_jax() -> list[ModuleType]:
    """Return all modules of JAX that are imported: some import a function by its name."""
    # A copy, which nothing can interrupt: another thread may import a module meanwhile.
    return [module for name, module in sys.modules.copy().items() if name.startswith("jax.")]
