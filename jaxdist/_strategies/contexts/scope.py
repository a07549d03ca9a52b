"""`Scope`, the reusable context manager that `Strategy.scope` returns."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Scope(contextlib.ContextDecorator, Generic[T]):
    """A context manager in which a strategy is the current one.

    As in `tf.distribute`, one object can be entered several times: one after the other, nested in
    itself, and from several threads. As a decorator it runs a function in the block.
    """

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[T]]) -> None:
        self._enter = enter
        self._local = threading.local()

    def __enter__(self) -> T:
        # A context manager of `contextlib` can be entered once only, so each entry makes its own.
        block = self._enter()
        strategy = block.__enter__()
        # Appended after `__enter__`: a block that raised an error must not be exited.
        self._open_blocks.append(block)
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._open_blocks.pop().__exit__(kind, error, traceback)

    @property
    def _open_blocks(self) -> list[contextlib.AbstractContextManager[T]]:
        """The open blocks of this thread, the innermost one last."""
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[contextlib.AbstractContextManager[T]] = self._local.entered
        return entered
