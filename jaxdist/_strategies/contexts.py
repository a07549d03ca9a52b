"""Scopes of strategies, and checks of the context in which their methods are called."""

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NoReturn, TypeVar

from jaxdist import _replica
from jaxdist._called import called
from jaxdist._strategies.properties import StrategyProperties
from jaxdist._values import current_binding
from jaxdist.errors import ContextError, InputContextError, MixedStrategyError

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


CALL_BEFORE_RUN = (
    "Call it before strategy.run, and pass what it returns as an argument of the step."
)


def advise_replica_method(method: str) -> str:
    """Return the advice to use `method` of the replica context."""
    return f"Inside a replica use jaxdist.get_replica_context().{method}, or merge_call."


def find_own_frame(strategy: StrategyProperties, what: str) -> _replica.Frame | None:
    """Return the current frame of the strategy; None outside of every strategy.

    Raises:
        MixedStrategyError: Another strategy is current.
    """
    frame = _replica.current_frame()
    if frame is not None and frame.strategy is not strategy:
        _refuse_mixing(strategy, what, frame)
    return frame


def _refuse_mixing(strategy: StrategyProperties, what: str, frame: _replica.Frame) -> NoReturn:
    raise MixedStrategyError(
        f"{type(strategy).__name__}.{what} was called {frame.describe()}.\n\n"
        f"{_explain_conflict(strategy, frame.strategy)}\n\n"
        f"Leave the scope of that {type(frame.strategy).__name__} first (or call "
        "jaxdist.experimental_set_strategy(None) if it was set that way), or use "
        "jaxdist.get_strategy() inside it."
    )


def _explain_conflict(called: StrategyProperties, current: StrategyProperties) -> str:
    """Explain why the called strategy and the current one do not mix."""
    # If both strategies have the same repr, the second message would contradict itself.
    if repr(called) == repr(current):
        return (
            f"Two strategies were made with the same arguments, {called!r}. They do not mix: each "
            "has its own values and programs. One strategy can be used in both places."
        )
    return (
        f"{current!r} is current there and not {called!r}, and strategies do not mix: their values "
        "are on different devices."
    )


@called(lambda what: f"strategy.{what}")
def check_across(strategy: StrategyProperties, what: str, remedy: str) -> _replica.Frame | None:
    """Return the current frame; raise an error inside a replica or under another strategy.

    Raises:
        ContextError: Inside a replica.
        MixedStrategyError: Another strategy is current.
    """
    frame = _replica.current_frame()
    # While a step is traced, a described slice may be used: a trace needs no real devices.
    is_described = strategy.layout.described is not None
    if is_described and (frame is None or not frame.is_inside_step):
        strategy.layout.check_can_run()
    if frame is None:
        return None
    # Every `reduce` comes here, so `find_own_frame` is not called.
    if frame.strategy is not strategy:
        _refuse_mixing(strategy, what, frame)
    if frame.replica is not None:
        _refuse_context(strategy, what, frame, remedy)
    return frame


def check_scope(strategy: StrategyProperties) -> None:
    """Raise an error if `scope` is called inside a step or under another strategy.

    Raises:
        ContextError: Inside a replica.
        MixedStrategyError: Another strategy is current.
    """
    frame = find_own_frame(strategy, "scope")
    if frame is not None and frame.is_inside_step:
        _refuse_context(strategy, "scope", frame, "Enter the scope outside strategy.run.")


def check_run(strategy: StrategyProperties) -> _replica.Frame | None:
    """Raise an error if `run` is called inside a replica or under another strategy.

    Returns:
        The frame of the calling merge function, or None outside of one.

    Raises:
        ContextError: Inside a replica.
        MixedStrategyError: Another strategy is current.
    """
    # This check comes first: inside a replica of another strategy the advice below would be wrong.
    frame = find_own_frame(strategy, "run")
    if frame is None:
        return None
    if frame.replica is not None:
        remedy = "A step cannot start another; call the function itself: fn(*args)."
        _refuse_context(strategy, "run", frame, remedy)
    return frame if frame.in_merge else None


def check_lower(strategy: StrategyProperties) -> None:
    """Raise an error if `lower` is called inside a step or under another strategy.

    Raises:
        ContextError: Inside a replica, or in a merge function.
        MixedStrategyError: Another strategy is current.
    """
    frame = check_run(strategy)
    if frame is not None:
        _refuse_context(strategy, "lower", frame, "Call it outside strategy.run.")


def check_not_in_function(strategy: StrategyProperties) -> None:
    """Raise an error if values of single replicas are read inside a `jaxdist.function`.

    Raises:
        ContextError: Inside a `jaxdist.function`.
    """
    if current_binding() is not None:
        raise ContextError(
            f"{type(strategy).__name__}.experimental_local_results was called inside a "
            "jaxdist.function.\n\n"
            "Per-replica values are unavailable while a function is traced.\n\n"
            "Return the value, and take its local results outside."
        )


def check_next() -> None:
    """Raise an error if the next batch of a distributed dataset is read inside a step.

    Raises:
        InputContextError: Inside a step.
    """
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step:
        return
    raise InputContextError(
        f"next() of a distributed dataset was called {frame.describe()}.\n\n"
        "The step is traced once, and every later call would use that one batch.\n\n"
        "Take the batch outside and pass it: strategy.run(step, args=(next(iterator),))."
    )


def _refuse_context(
    strategy: StrategyProperties, what: str, frame: _replica.Frame, remedy: str
) -> NoReturn:
    raise ContextError(
        f"{type(strategy).__name__}.{what} was called {frame.describe()}.\n\n"
        f"It is a method of the cross-replica context, outside of a replica.\n\n{remedy}"
    )
