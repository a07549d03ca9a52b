"""Context variables that a block sets."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


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
