"""`Monitor`: calls a step repeatedly."""

from collections.abc import Callable
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, check_callable
from jaxdist.errors import OutOfRangeError


class Monitor:
    """A loop that calls a step until its data ends.

    Args:
        step_callable: Called without arguments for each step.
        session: Must be None; there are no sessions.

    Raises:
        ArgumentTypeError: `step_callable` is not callable.
        ArgumentError: A session is given.

    Example:
        >>> iterator = iter([1, 2, 3])
        >>> monitor = jaxdist.contrib.Monitor(lambda: print(next(iterator)))
        >>> monitor.run_steps(2)
        1
        2

    Source:
        `tf.contrib.distribute.Monitor`.
    """

    @called("contrib.Monitor")
    def __init__(self, step_callable: Callable[[], Any], session: Any = None) -> None:
        check_callable(step_callable, "step_callable")
        if session is not None:
            raise refuse(
                f"session={session!r}.",
                "There are no sessions: steps run when they are called.",
                "Leave it out.",
            )
        self._step = step_callable

    @called("Monitor.run_steps")
    def run_steps(self, num_steps: int | None = None) -> None:
        """Call the step `num_steps` times, or until it raises `OutOfRangeError`.

        Args:
            num_steps: Number of steps; None runs until the data ends.

        Raises:
            ArgumentTypeError: `num_steps` is neither an int nor None.
        """
        if num_steps is not None:
            num_steps = as_integer("num_steps", num_steps, least=0, example=1)
        done = 0
        while num_steps is None or done < num_steps:
            try:
                self._step()
            # A plain Python iterator ends with `StopIteration`.
            except (OutOfRangeError, StopIteration):
                return
            done += 1

    def __repr__(self) -> str:
        return f"Monitor({getattr(self._step, '__name__', self._step)!r})"
