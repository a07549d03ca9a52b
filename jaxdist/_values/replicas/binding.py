"""Values that a trace replaces: arrays of variables, origins of arguments, and sources of batches.

Also checks for tracers that outlived their trace.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import jax

from jaxdist import _compat
from jaxdist._called import name_call
from jaxdist._typing import PyTree
from jaxdist.errors import ContextError


class BatchSource(abc.ABC):
    """An iterator whose batches a compiled `jaxdist.function` takes, and may put back unused."""

    @abc.abstractmethod
    def take(self) -> PyTree:
        """Return the next batch.

        Raises:
            StopIteration: No batch is left.
        """

    @abc.abstractmethod
    def position(self) -> Any:
        """Return the current position, which `put_back` accepts."""

    @abc.abstractmethod
    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Take back batches, so that `take` returns them again.

        Args:
            taken: The batches that were taken last, each with the position after it.
            before: The position before the first of them.
        """


class Binding(Protocol):
    """The arrays of variables, the origins of tracers, and batches, for one trace."""

    def held(self, variable: Any, array: Any) -> Any:
        """Return the array that replaces `array`, which the variable holds outside the trace."""
        ...

    def hold(self, variable: Any, array: Any) -> None:
        """Store the array that the variable holds from now on."""
        ...

    def has_written(self, variable: Any) -> bool:
        """Whether the trace has assigned the variable, outside of the steps in it."""
        ...

    def origin(self, value: Any) -> "Origin | None":
        """Return the origin of a traced argument; None for a value that was computed."""
        ...

    def next_batch(self, feed: Any) -> Any:
        """Return the next batch of an iterator."""
        ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the array of a traced argument is: its sharding, or None if it is on no device."""

    sharding: Any
    is_committed: bool


def origin_of(value: Any) -> Origin | None:
    """Return the origin of a traced value, or None if no binding knows it."""
    binding = current_binding()
    return None if binding is None else binding.origin(value)


_BINDING: ContextVar[Binding | None] = ContextVar("jaxdist_binding", default=None)
# The bound method itself, without a function around it: every step with variables calls it.
current_binding = _BINDING.get


def use_binding(binding: Binding | None) -> contextlib.AbstractContextManager[None]:
    """Make `binding` the current one in the block; None for what is made outside of all traces."""
    return _compat.set_in_block(_BINDING, binding)


def is_leaked(value: Any) -> bool:
    """Whether `value` is a tracer although the caller is not being traced."""
    return isinstance(value, jax.core.Tracer) and not _compat.is_inside_trace()


def refuse_leaked(name: object, value: Any) -> None:
    """Raise if `value` is a tracer that outlived its trace.

    Raises:
        ContextError: `value` is such a tracer.
    """
    if is_leaked(value):
        raise make_leak_error(f"{name_call()} was given {name}, ", value)


def make_leak_error(start: str, value: Any) -> ContextError:
    """Return the error for a tracer that outlived its trace; the text begins with `start`."""
    return ContextError(
        f"{start}a traced value ({value.aval.str_short()}) of a function that JAX has finished "
        "tracing.\n\n"
        "A step, or a function under jax.jit, kept it in a list, an attribute or a global. It has "
        "a number only while the compiled function runs.\n\n"
        "Return the value from that function, and use what it returns."
    )
