"""Waiting by the rules of `max_staleness`."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

from jaxdist._called import name_call
from jaxdist._parameter_server.server.staleness.registrations import ClosureId, Registrations
from jaxdist._validate import format_lines
from jaxdist.errors import DeadlineExceededError

GetVersions = Callable[[], Mapping[str, int]]


class Admission:
    """The waiting of reads and changes. The caller holds the lock; waiting releases it.

    Args:
        condition: The lock of the server.
        max_staleness: The bound.
        clock: Returns the time in seconds.
        check: Raises if the server cannot be used any more.
    """

    def __init__(
        self,
        condition: threading.Condition,
        max_staleness: int,
        clock: Callable[[], float],
        check: Callable[[], None],
    ) -> None:
        self.flight = Registrations(max_staleness, clock)
        self._condition, self._clock, self._check = condition, clock, check
        self._unnumbered = itertools.count()

    def make_id(self, client: str, closure: int | None) -> ClosureId:
        """Return the id of a closure; a change without one gets a number below 0."""
        return client, (-1 - next(self._unnumbered) if closure is None else closure)

    def admit(
        self,
        closure: ClosureId,
        get_versions: GetVersions,
        wait_seconds: float,
        hold_seconds: float,
    ) -> None:
        """Wait until a read is admitted, and register it.

        Raises:
            DeadlineExceededError: It was not admitted in time.
        """
        # A closure that runs again reads again: its first read is no longer in flight.
        self.release(closure)
        ticket = self.flight.queue(get_versions())
        try:
            self._wait(closure, lambda: self.flight.find_blockers(ticket), wait_seconds)
            self.flight.register(closure, get_versions(), hold_seconds)
        finally:
            self.flight.leave_queue(ticket)
            self._condition.notify_all()

    def wait_for_older(self, closure: ClosureId, get_versions: GetVersions, seconds: float) -> None:
        """Wait until a change makes no other closure too late.

        Raises:
            DeadlineExceededError: The older closures did not change the variables in time.
        """
        self.flight.extend(closure, seconds)

        def find_holders() -> list[ClosureId] | None:
            return self.flight.find_older(closure, get_versions()) or None

        self._wait(closure, find_holders, seconds)

    def release(self, closure: ClosureId) -> bool:
        """Remove a closure, and let others go on; return whether it was registered."""
        was_held = self.flight.release(closure)
        if was_held:
            self._condition.notify_all()
        return was_held

    def _wait(
        self,
        closure: ClosureId,
        find_holders: Callable[[], list[ClosureId] | None],
        seconds: float,
    ) -> None:
        deadline = self._clock() + seconds
        while True:
            if self.flight.release_late():
                self._condition.notify_all()
            holders = find_holders()
            if holders is None:
                return
            now = self._clock()
            if now >= deadline:
                lines = self.flight.describe(holders)
                number = closure[1] if closure[1] >= 0 else None
                raise _make_wait_error(number, seconds, self.flight.max_staleness, lines)
            next_release = self.flight.get_next_deadline()
            until = deadline if next_release is None else min(deadline, next_release)
            self._condition.wait(max(until - now, 0.001))
            self._check()


def _make_wait_error(
    closure: int | None, seconds: float, s: int, holders: Sequence[str]
) -> DeadlineExceededError:
    who = "a change outside of a function" if closure is None else f"function {closure}"
    held = format_lines(list(holders)) or "Reads that came before."
    return DeadlineExceededError(
        f"{name_call()}: {who} waited {seconds:g} s for other functions:\n{held}\n\n"
        f"With max_staleness={s}, at most {s + 1} functions have read a variable and not yet "
        "changed it, and the oldest changes it first.\n\n"
        "Wait longer, let those functions finish or release them, or make max_staleness larger."
    )
