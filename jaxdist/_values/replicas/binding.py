"""Arrays that stand for those of variables while a function that uses them is traced."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol


class Binding(Protocol):
    """Has the arrays of variables for one trace."""

    def held(self, variable: Any, array: Any) -> Any:
        """The array that stands for `array`, which the variable holds."""
        ...

    def hold(self, variable: Any, array: Any) -> None:
        """Take the array that the variable holds from now on."""
        ...

    def origin(self, value: Any) -> "Origin | None":
        """Where the array lies that a traced value stands for; None for what was computed."""
        ...

    def next_of(self, feed: Any) -> Any:
        """The next batch of an iterator."""
        ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """The layout of an argument: None for what lies on no devices."""

    sharding: Any
    is_committed: bool


def origin_of(value: Any) -> Origin | None:
    """The origin of a traced value, where a function is traced that knows it."""
    binding = current_binding()
    return None if binding is None else binding.origin(value)


_BINDING: ContextVar[Binding | None] = ContextVar("jaxdist_binding", default=None)
# Asked at every step over variables.
current_binding = _BINDING.get


@contextlib.contextmanager
def bound(binding: Binding) -> Iterator[None]:
    """Give the block these arrays of variables."""
    token = _BINDING.set(binding)
    try:
        yield
    finally:
        _BINDING.reset(token)
