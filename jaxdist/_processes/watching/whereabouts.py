"""`HERE`: records in memory what the threads of this process are doing."""

import dataclasses
import threading
import time
from collections.abc import Iterable

OUTSIDE = "outside of jaxdist"

# Place, step, when it began, whether it waits for other processes, and the place around it.
# A plain tuple: a dataclass takes five times as long to make.
_Place = tuple[str, int | None, float, bool, "_Place | None"]


@dataclasses.dataclass(frozen=True)
class Doing:
    """What one thread is doing.

    Args:
        thread: Identifier of the thread.
        place: Name of the operation.
        step: Number of the step, if known.
        since: When it began, by `time.monotonic`.
        in_wait: Whether the operation waits for other processes.
    """

    thread: int
    place: str
    step: int | None
    since: float
    in_wait: bool


class Whereabouts:
    """Records what the threads of this process are doing.

    A thread writes only its own entry of a dict, so no lock is needed. Places nest: when a
    reduction inside a merge ends, the thread is in the merge again.

    Cost:
        Some hundred nanoseconds for `enter` and `leave` together.

    Example:
        >>> from jaxdist._processes.watching.whereabouts import Whereabouts
        >>> here = Whereabouts()
        >>> here.enter("reduce", step=3, in_wait=True)
        >>> here.read().place, here.read().step
        ('reduce', 3)
        >>> here.leave()
        >>> here.read().place
        'outside of jaxdist'
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._last = threading.main_thread().ident or 0
        self._began = time.monotonic()
        # The processes that the last error of this process named. This process left its collective
        # because of them, so it is not itself behind.
        self.blames: tuple[int, ...] | None = None

    def enter(self, place: str, step: int | None = None, in_wait: bool = False) -> None:
        """Begin an operation; `leave` ends it, also when it raises.

        Args:
            place: Name of the operation, such as "reduce (call 3)".
            step: Number of the step; by default that of the operation around this one.
            in_wait: Whether the operation waits for other processes.
        """
        thread = threading.get_ident()
        outer = self._places.get(thread)
        if step is None and outer is not None:
            step = outer[1]
        self._places[thread] = (place, step, time.monotonic(), in_wait, outer)
        if in_wait:
            self.blames = None
        self._last = thread

    def leave(self) -> None:
        """End the operation that this thread began last."""
        thread = threading.get_ident()
        place = self._places[thread]
        outer = place[4]
        if outer is None or (outer[4] is None and outer[0] is OUTSIDE):
            # Keep the step; the time outside begins now.
            outer = (OUTSIDE, place[1], time.monotonic(), False, None)
        self._places[thread] = outer

    def blame(self, processes: Iterable[int]) -> None:
        """Note that this process leaves its collective because of other processes."""
        self.blames = tuple(processes)

    def read(self) -> Doing:
        """Return what the thread that runs the steps is doing.

        This is the main thread if it ever began an operation, otherwise the last thread that did.
        """
        main = threading.main_thread().ident or 0
        thread = main if main in self._places else self._last
        place = self._places.get(thread)
        if place is None:
            return Doing(thread, OUTSIDE, None, self._began, False)
        return Doing(thread, place[0], place[1], place[2], place[3])


HERE = Whereabouts()
