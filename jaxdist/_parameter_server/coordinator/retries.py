"""Decides how long and how often closures wait for servers and workers; makes the errors."""

import dataclasses
import os
import time

from jaxdist._parameter_server.coordinator.scheduled import Scheduled, Trouble
from jaxdist._processes import get_settings
from jaxdist._validate import show
from jaxdist.errors import (
    ArgumentError,
    DeadlineExceededError,
    PSUnavailableError,
    WorkerUnavailableError,
)


@dataclasses.dataclass(frozen=True)
class WaitSettings:
    """How long, and how often, closures wait for servers and workers.

    Each can be given as an environment variable, such as `JAXDIST_SERVER_SECONDS`.

    Args:
        server_seconds: How long a closure waits for a server that does not answer.
        server_tries: How often a closure is tried while a server does not answer; None means that
            only the time counts.
        worker_seconds: When all workers have been lost for so long, `join` raises.
        worker_tries: A closure that was running as often as this when a worker was lost fails.
        quiet_seconds: After this time without a finished closure there is a report in the log.
    """

    server_seconds: float = 300.0
    server_tries: int | None = None
    worker_seconds: float = 3600.0
    worker_tries: int = 10
    quiet_seconds: float = 60.0


class Backoff:
    """Pauses between tries: each is twice as long as the one before, up to the longest.

    Args:
        first: The first pause, in seconds.
        longest: The longest.

    Example:
        >>> from jaxdist._parameter_server.coordinator.retries import Backoff
        >>> backoff = Backoff(0.1, 0.25)
        >>> [backoff.find_next() for _ in range(3)]
        [0.1, 0.2, 0.25]
    """

    def __init__(self, first: float = 0.02, longest: float = 0.25) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def find_next(self) -> float:
        """Return how long to wait now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._next = self._first


def read_wait_settings() -> WaitSettings:
    """Return the settings of this process.

    Raises:
        ArgumentError: An environment variable is not a number above 0.

    Example:
        >>> from jaxdist._parameter_server.coordinator.retries import read_wait_settings
        >>> read_wait_settings().worker_tries
        10
    """
    return WaitSettings(
        server_seconds=_read("JAXDIST_SERVER_SECONDS", WaitSettings.server_seconds),
        server_tries=int(_read("JAXDIST_SERVER_TRIES", 0.0, whole=True)) or None,
        worker_seconds=_read("JAXDIST_WORKER_SECONDS", WaitSettings.worker_seconds),
        worker_tries=int(_read("JAXDIST_WORKER_TRIES", WaitSettings.worker_tries, whole=True)),
        quiet_seconds=get_settings().quiet_seconds,
    )


def _read(variable: str, default: float, whole: bool = False) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        number = float(int(text)) if whole else float(text)
    except ValueError:
        number = -1.0
    # Written so that nan is refused as well.
    if not number > 0:
        what = "a whole number above 0" if whole else "a time in seconds, above 0"
        raise ArgumentError(
            f"The environment variable {variable} is {show(text)}.\n\nIt must be {what}.\n\n"
            f"Set for instance {variable}=60, or unset it."
        )
    return number


def note_server(
    item: Scheduled,
    worker: int,
    error: PSUnavailableError | DeadlineExceededError,
    settings: WaitSettings,
) -> PSUnavailableError | DeadlineExceededError | None:
    """Note that a server did not answer a closure.

    Returns:
        None if the closure runs again; otherwise its error.
    """
    trouble = item.server_trouble = item.server_trouble or Trouble()
    trouble.tries += 1
    trouble.workers.add(worker)
    waited = time.monotonic() - trouble.since
    is_tried_enough = settings.server_tries is not None and trouble.tries >= settings.server_tries
    if waited < settings.server_seconds and not is_tried_enough:
        return None
    # The class may be one of a user's dataset, which takes other arguments.
    kind = DeadlineExceededError if isinstance(error, DeadlineExceededError) else PSUnavailableError
    made = kind(
        f"{first_line(error)}\n\n{item.describe()} was tried {_count(trouble.tries, 'time')} "
        f"since {trouble.began}, for {waited:.1f} s, by {_name_workers(trouble.workers)}. "
        f"A function waits {settings.server_seconds:g} s (JAXDIST_SERVER_SECONDS) for a server to "
        "come back"
        + ("" if settings.server_tries is None else f", and is tried {settings.server_tries} times")
        + f".\n\n{_find_remedy(error)} Set JAXDIST_SERVER_SECONDS="
        f"{2 * settings.server_seconds:g} to wait longer.",
        error.processes,
    )
    made.__cause__ = error
    return made


def _find_remedy(error: PSUnavailableError | DeadlineExceededError) -> str:
    # An error of no server in particular has its own: a function may be too slow for a bound.
    paragraphs = str(error).split("\n\n")
    if not error.processes and len(paragraphs) == 3:
        return paragraphs[-1]
    return "Start the server again: it then serves from its snapshot."


def note_lost_worker(
    item: Scheduled, worker: int, error: WorkerUnavailableError, settings: WaitSettings
) -> WorkerUnavailableError | None:
    """Note that a worker was lost while it ran a closure.

    Returns:
        None if the closure runs again; otherwise its error.
    """
    item.lost_on += (worker,)
    if len(item.lost_on) < settings.worker_tries:
        return None
    made = WorkerUnavailableError(
        f"{first_line(error)}\n\n{item.describe()} was running each of the "
        f"{_count(len(item.lost_on), 'time')} that a worker was lost "
        f"({_name_workers(set(item.lost_on))}), so it may be the cause, for instance by "
        "taking too much memory.\n\n"
        "Look at the logs of these workers. Set "
        f"JAXDIST_WORKER_TRIES={2 * settings.worker_tries} if they ended for another reason.",
        error.processes or (worker,),
    )
    made.__cause__ = error
    return made


def make_all_lost_error(seconds: float, error: WorkerUnavailableError) -> WorkerUnavailableError:
    """Return the error of a job in which all workers are lost."""
    made = WorkerUnavailableError(
        f"All workers have been lost for {seconds:.1f} s: {first_line(error)}\n\n"
        "Functions wait for a worker as long as one is left, or comes back in time "
        "(JAXDIST_WORKER_SECONDS).\n\n"
        "Start the workers again, then schedule the functions again.",
        error.processes,
    )
    made.__cause__ = error
    return made


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error."""
    return str(error).partition("\n")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _name_workers(workers: set[int]) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))
