"""`max_staleness`: which reads and changes wait, and for which closures.

# Note [Bounded staleness]
The closures in flight of a variable are in the order of their reads. With the version `v` of the
variable, the bound `s`, and the version `r` that the k-th oldest of them (k from 0) has read, a
server keeps `v + k <= r + s` true for all of them. So the k-th oldest meets the bound even if all
older ones change the variable first.

- A read joins at the end with `r = v`: it is admitted if at most `s` others are in flight.
- A change moves `v` to `v + 1`, so it waits while `v + 1 + k > r + s` for the k-th oldest of the
  others. For closures behind the one that changes this is true already, because their k decreases
  by one. So a closure waits only for older ones, and the oldest never waits.

A closure reads once on each server, and names all variables that it changes there. So it never
waits for a read while it holds another, and the order is the same for all variables of a server.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxdist._called import name_call
from jaxdist._validate import format_lines
from jaxdist.errors import DeadlineExceededError

ClosureId = tuple[str, int]  # the client, and the number of the closure


@dataclasses.dataclass
class _Registration:
    reads: dict[str, int]  # the version of each variable that the closure has read
    since: float
    until: float


class Registrations:
    """The closures in flight on one server, with the rules of `max_staleness`.

    It has no lock: the server calls it with its own.

    Args:
        max_staleness: The bound.
        clock: Returns the time in seconds.
    """

    def __init__(self, max_staleness: int, clock: Callable[[], float]) -> None:
        self.max_staleness = max_staleness
        self._clock = clock
        self._held: dict[ClosureId, _Registration] = {}
        # For each variable its closures in flight, the oldest first, with the version they read.
        self._flight: dict[str, dict[ClosureId, int]] = {}
        self._tickets = itertools.count()
        self._waiting: dict[int, frozenset[str]] = {}

    def queue(self, names: Iterable[str]) -> int:
        """Take a place among the reads that wait to be admitted, and return its number."""
        ticket = next(self._tickets)
        self._waiting[ticket] = frozenset(names)
        return ticket

    def leave_queue(self, ticket: int) -> None:
        """Give up a place among the reads that wait."""
        self._waiting.pop(ticket, None)

    def find_blockers(self, ticket: int) -> list[ClosureId] | None:
        """Return the closures for which a read waits; None if it is admitted now."""
        names = self._waiting[ticket]
        # First come, first served: otherwise a read of many variables could wait forever.
        is_behind = any(t < ticket and names & others for t, others in self._waiting.items())
        full = [n for n in names if len(self._flight.get(n, ())) > self.max_staleness]
        if not is_behind and not full:
            return None
        return list(dict.fromkeys(c for n in sorted(names) for c in self._flight.get(n, ())))

    def register(self, closure: ClosureId, versions: Mapping[str, int], seconds: float) -> None:
        """Add a closure that has read these versions, for at most so many seconds."""
        self.release(closure)
        now = self._clock()
        self._held[closure] = _Registration(dict(versions), now, now + seconds)
        for name, version in versions.items():
            self._flight.setdefault(name, {})[closure] = version

    def find_older(self, closure: ClosureId | None, versions: Mapping[str, int]) -> list[ClosureId]:
        """Return the closures that must change these variables before `closure` may."""
        found: dict[ClosureId, None] = {}
        for name, version in versions.items():
            others = [x for x in self._flight.get(name, {}).items() if x[0] != closure]
            for k, (_, read) in enumerate(others):
                if version + 1 + k > read + self.max_staleness:
                    found.update(dict.fromkeys(other for other, _ in others[: k + 1]))
        return list(found)

    def extend(self, closure: ClosureId, seconds: float) -> None:
        """Let a closure stay for so many seconds from now, at least."""
        held = self._held.get(closure)
        if held is not None:
            # A little longer than it waits, so that its own wait ends first.
            held.until = max(held.until, self._clock() + seconds + 1.0)

    def get_reads(self, closure: ClosureId) -> Mapping[str, int] | None:
        """Return the versions that a closure has read; None if it is not registered."""
        held = self._held.get(closure)
        return None if held is None else held.reads

    def release(self, closure: ClosureId) -> bool:
        """Remove a closure; return whether it was registered."""
        held = self._held.pop(closure, None)
        if held is None:
            return False
        for name in held.reads:
            flight = self._flight[name]
            del flight[closure]
            if not flight:
                del self._flight[name]
        return True

    def release_late(self) -> list[ClosureId]:
        """Remove the closures whose deadline is over, and return them."""
        now = self._clock()
        late = [closure for closure, held in self._held.items() if held.until <= now]
        for closure in late:
            self.release(closure)
        return late

    def get_next_deadline(self) -> float | None:
        """Return the earliest deadline of the closures in flight."""
        return min((held.until for held in self._held.values()), default=None)

    def describe(self, closures: Iterable[ClosureId]) -> list[str]:
        """Return a line for each closure: its number, its client, and how long ago it has read."""
        now = self._clock()
        return [
            f"function {number} of client {client!r}, which has read for {now - held.since:.1f} s"
            for (client, number), held in ((c, self._held[c]) for c in closures if c in self._held)
        ]

    def __len__(self) -> int:
        return len(self._held)


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
        """Remove a closure, and let others continue; return whether it was registered."""
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
