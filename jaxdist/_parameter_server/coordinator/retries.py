"""How often a closure runs again, and the errors when that is enough."""

import time

from jaxdist._parameter_server.coordinator.scheduled import Scheduled, Trouble
from jaxdist._parameter_server.coordinator.settings import WaitSettings
from jaxdist.errors import DeadlineExceededError, PSUnavailableError, WorkerUnavailableError


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
    kind = DeadlineExceededError if isinstance(error, DeadlineExceededError) else PSUnavailableError
    made = kind(
        f"{_first_line(error)}\n\n{item.describe()} was tried {_count(trouble.tries, 'time')} "
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
        f"{_first_line(error)}\n\n{item.describe()} was running each of the "
        f"{_count(len(item.lost_on), 'time')} that a worker was lost "
        f"({_name_workers(set(item.lost_on))}), so it may be what ends them, for instance by "
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
        f"All workers have been lost for {seconds:.1f} s: {_first_line(error)}\n\n"
        "Functions wait for a worker as long as one is left, or comes back in time "
        "(JAXDIST_WORKER_SECONDS).\n\n"
        "Start the workers again, then schedule the functions again.",
        error.processes,
    )
    made.__cause__ = error
    return made


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _name_workers(workers: set[int]) -> str:
    return ("worker " if len(workers) == 1 else "workers ") + ", ".join(map(str, sorted(workers)))
