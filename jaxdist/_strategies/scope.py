"""What `Strategy.scope` gives: a block that can be entered again."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Scope(contextlib.ContextDecorator, Generic[T]):
    """A block in which a strategy is the current one.

    One object can be entered several times, one after the other, inside itself and from several
    threads, as that of `tf.distribute`. As a decorator it makes a function run in the block.
    """

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[T]]) -> None:
        self._enter = enter
        self._local = threading.local()

    def __enter__(self) -> T:
        block = self._enter()
        strategy = block.__enter__()
        self._entered.append(block)
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

    @property
    def _entered(self) -> list[contextlib.AbstractContextManager[T]]:
        """The blocks of this thread that were entered and not left, the last one at the end."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[contextlib.AbstractContextManager[T]] = self._local.entered
        return entered
