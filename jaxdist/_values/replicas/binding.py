"""Arrays that replace those of variables while a `jaxdist.function` is traced."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol


class Binding(Protocol):
    """The arrays of variables, the origins of tracers, and batches, for one trace."""

    def held(self, variable: Any, array: Any) -> Any:
        """Return the array that replaces `array`, which the variable holds outside the trace."""
        ...

    def hold(self, variable: Any, array: Any) -> None:
        """Store the array that the variable holds from now on."""
        ...

    def origin(self, value: Any) -> "Origin | None":
        """Return the origin of a traced argument; None for a value that was computed."""
        ...

    def next_of(self, feed: Any) -> Any:
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


@contextlib.contextmanager
def bound(binding: Binding) -> Iterator[None]:
    """Make `binding` the current one in the block."""
    token = _BINDING.set(binding)
    try:
        yield
    finally:
        _BINDING.reset(token)
