"""`Agreement`: each process sends all others a short string, and all get the same strings."""

import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._compat import get_coordination_client
from jaxdist._processes.process import Process, get_process_of_job
from jaxdist._processes.settings import get_settings
from jaxdist._processes.store import Store, get_store
from jaxdist.errors import ContextError, DeadlineExceededError, UnavailableError

# Finds processes that ended without a note, such as by SIGKILL. `watching.current` sets it.
_find_silent: list[Callable[[], dict[int, str]]] = []


def find_ended_by(callback: Callable[[], dict[int, str]] | None) -> None:
    """Set the function that returns ended processes and how they ended; None removes it."""
    _find_silent[:] = [] if callback is None else [callback]


# While a process waits for the string of another, it checks this often whether that one has ended.
_LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class _Wait:
    """One wait for the strings of the others; the attributes are those of `Agreement.gather`."""

    limit: float
    purpose: str
    start: float
    is_stopped: Callable[[], bool]
    needed_since: Callable[[], float | None] | None

    def find_end(self) -> float:
        """Return when the wait ends, as far as known now."""
        if self.needed_since is None:
            return self.start + self.limit
        since = self.needed_since()
        return math.inf if since is None else max(since, self.start) + self.limit


class Agreement:
    """Exchanges short strings between all processes of a job, over its key-value store.

    The n-th call with a channel meets the n-th calls of the other processes with this channel. So
    each thread of a process uses its own channels. This is not a collective: a thread that reads
    ahead can use it while the devices compute.

    Cost:
        Each call makes one request to the store to write, and one for each other process to read:
        about 0.5 ms on one machine with two processes.

    Args:
        store: The store of the job.
        process: This process.

    Example:
        >>> from jaxdist._processes import Agreement, LocalStore, Process
        >>> Agreement(LocalStore(), Process(0, 1)).gather("rows", "8")
        ('8',)
    """

    def __init__(self, store: Store, process: Process) -> None:
        self.process = process
        self._store = store
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def gather(
        self,
        channel: str,
        text: str,
        seconds: float | None = None,
        *,
        purpose: str = "",
        is_stopped: Callable[[], bool] = bool,
        needed_since: Callable[[], float | None] | None = None,
    ) -> tuple[str, ...]:
        """Return the strings of all processes, in the order of the processes.

        Args:
            channel: Which exchange this is; all processes use it equally often.
            text: The string of this process.
            seconds: How long to wait for the others; None means `collective_seconds`.
            purpose: What is exchanged, for errors.
            is_stopped: Returns whether nobody needs the strings any more; called twice a second.
            needed_since: Returns since when the strings are needed, by `time.monotonic`, or None
                while they are not; for a thread that reads ahead. `seconds` count from then, or
                from the call if that is later.

        Raises:
            ContextError: `is_stopped` returned True.
            DeadlineExceededError: A process has not made this call in time.
            UnavailableError: A process has ended.
        """
        process = self.process
        if process.count == 1:
            return (text,)
        limit = get_settings().collective_seconds if seconds is None else seconds
        with self._lock:
            number = self._counts[channel] = self._counts.get(channel, 0) + 1
        here = f"jaxdist/agree/{channel}/{number}"
        self._store.set(f"{here}/{process.index}", text, overwrite=True)
        wait = _Wait(limit, purpose or channel, time.monotonic(), is_stopped, needed_since)
        texts: list[str] = []
        for other in range(process.count):
            if other == process.index:
                texts.append(text)
                continue
            key = f"{here}/{other}"
            texts.append(self._wait_for(key, wait))
        # All have written number n, so all have read number n - 1.
        if number > 1:
            self._store.delete(f"jaxdist/agree/{channel}/{number - 1}/{process.index}")
        return tuple(texts)

    def count(self, name: str) -> int:
        """Return how many times `count` has been called with `name`, including this call.

        Nothing is exchanged: objects that all processes make in the same order get the same number
        in each of them.
        """
        with self._lock:
            number = self._counts[name] = self._counts.get(name, 0) + 1
        return number

    def _wait_for(self, key: str, wait: "_Wait") -> str:
        here, _, other = key.rpartition("/")
        while True:
            left = wait.find_end() - time.monotonic()
            found = self._store.wait_for(key, max(0.0, min(_LOOK_SECONDS, left)))
            if found is not None:
                return found
            if wait.is_stopped():
                raise ContextError(
                    f"The exchange of {wait.purpose} was stopped before it was complete.\n\n"
                    "This process no longer needs it.\n\nNothing has to be done."
                )
            present = self._store.list(f"{here}/")
            ended = self._list_ended(present, here)
            if ended:
                raise UnavailableError(_describe_ended(wait.purpose, ended), [*ended])
            if time.monotonic() >= wait.find_end():
                missing = [
                    i for i in range(self.process.count) if f"{here}/{i}" not in present
                ] or [int(other)]
                raise DeadlineExceededError(
                    f"{_list_processes(missing)} did not take part in the exchange of "
                    f"{wait.purpose} within {wait.limit:g} s.\n\n"
                    "All processes of a job make the same calls in the same order.\n\n"
                    "Look at what that process does instead: it may have ended, wait elsewhere, or "
                    "run another program.",
                    missing,
                )

    def _list_ended(self, present: dict[str, str], here: str) -> dict[int, str]:
        """Return the processes that have ended without writing their string, and how."""
        left = self._store.list("jaxdist/left/")
        ended = {int(key.rpartition("/")[2]): text for key, text in left.items()}
        for find in _find_silent:
            ended = find() | ended
        return {i: text for i, text in sorted(ended.items()) if f"{here}/{i}" not in present}


def _list_processes(numbers: list[int]) -> str:
    return ", ".join(f"process {n}" for n in numbers)


def _describe_ended(purpose: str, ended: dict[int, str]) -> str:
    said = "; ".join(f"process {n} has ended ({text})" for n, text in ended.items())
    return (
        f"{said}, before the exchange of {purpose}.\n\n"
        "All processes of a job make the same calls in the same order.\n\n"
        "Look for the error of the process that ended; then start the job again."
    )


_agreements: list[tuple[Any, Agreement]] = []


def get_agreement() -> Agreement | None:
    """Return the agreement of this process's job, or None if it has not joined one."""
    store, process = get_store(), get_process_of_job()
    if store is None or process is None:
        return None
    # One object for each connection, since it counts the calls.
    client = get_coordination_client()
    if not _agreements or _agreements[0][0] is not client:
        _agreements[:] = [(client, Agreement(store, process))]
    return _agreements[0][1]


def find_odd_ones(values: Sequence[Any]) -> tuple[tuple[int, ...], int | None]:
    """Return the processes whose value is not the most common one, and a process that has it.

    None stands for a process without a value. Of equally common values, the first one counts as
    the most common.

    Example:
        >>> from jaxdist._processes import find_odd_ones
        >>> find_odd_ones(["a", "b", None, "b"]), find_odd_ones(["a", "b"])
        (((0,), 1), ((1,), 0))
    """
    present = [(i, v) for i, v in enumerate(values) if v is not None]
    if not present:
        return (), None
    # `most_common` keeps the order in which values were first seen.
    usual = Counter(v for _, v in present).most_common(1)[0][0]
    odd = tuple(i for i, v in present if v != usual)
    return odd, next(i for i, v in present if v == usual)
