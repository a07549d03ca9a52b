"""`Waiter`: a call that waits for other processes, with a time limit."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import jax

from jaxdist._compat import is_ready
from jaxdist._processes.agreement import Agreement, get_agreement
from jaxdist._processes.settings import get_settings
from jaxdist._processes.watching.current import get_doctor
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose
from jaxdist._processes.watching.doctor import cut_collectives
from jaxdist._processes.watching.explain import (
    describe_deadline,
    explain_error,
    is_collective_error,
)
from jaxdist._processes.watching.whereabouts import HERE
from jaxdist.errors import ContextError, DeadlineExceededError, OtherProcessError

# The caller normally ends its own wait; the doctor does so if the caller is inside C++ code.
_GRACE_SECONDS = 0.05
_MOST_SECONDS_TO_DIAGNOSE = 10.0


class Limit:
    """The time limit of one wait, from now on.

    Args:
        seconds: How long the wait may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.found = Diagnosis((), "This process has joined no other processes.")
        self._lock = threading.Lock()
        self._is_expiring = False
        self._is_done = False
        self._has_expired = threading.Event()
        doctor = get_doctor()
        if doctor is not None:
            doctor.watch_limit(self)

    @property
    def ends_at(self) -> float:
        """When the doctor ends the wait, by `time.monotonic`."""
        return self.end + _GRACE_SECONDS

    def expire(self) -> None:
        """Find which process is behind, and end the collectives of this process."""
        with self._lock:
            if self._is_expiring or self._is_done:
                return
            self._is_expiring = True
        doctor = get_doctor()
        try:
            if doctor is not None:
                table = doctor.observer.look_until_fresh()
                self.found = diagnose(table, doctor.process.index)
                HERE.blame(self.found.behind)
                # Before the connections close, so that the others know which process to name.
                doctor.publish()
        except Exception as error:
            self.found = Diagnosis((), f"The coordination service did not answer: {error}")
        finally:
            cut_collectives()
            self._has_expired.set()

    def finish(self) -> bool:
        """Cancel the limit, and return whether its time had already passed."""
        doctor = get_doctor()
        if doctor is not None:
            doctor.forget_limit(self)
        with self._lock:
            self._is_done = True
            is_expiring = self._is_expiring
        if is_expiring:
            self._has_expired.wait(_MOST_SECONDS_TO_DIAGNOSE)
        return is_expiring


_FIRST_NAP = 20e-6
_LONGEST_NAP = 1e-3


class Waiter:
    """A context in which this process waits for the others.

    Errors of collectives become `UnavailableError` or `DeadlineExceededError`, which name the
    process that caused them. When `seconds` have passed, the collective is ended: see Note
    [Stuck collectives]. This also works while JAX runs the collective inside the call that
    dispatches it, as it does for small programs on CPU.

    Cost:
        About 2 us without `seconds`. With them, waiting by polling takes up to 1 ms longer.

    Args:
        call: What the user called, for errors.
        place: What reports say, such as "reduce (call 3)".
        seconds: How long the context may take; None for no limit.
        step: Number of the step, if known.

    Raises:
        DeadlineExceededError: `seconds` have passed, or a collective has reached XLA's limit.
        UnavailableError: Another process has ended.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxdist._processes import Waiter
        >>> with Waiter("reduce", "reduce (call 1)", seconds=60) as waiter:
        ...     total = jnp.arange(3).sum()
        ...     waiter.wait([total])
    """

    def __init__(
        self, call: str, place: str, seconds: float | None = None, step: int | None = None
    ) -> None:
        self._call = call
        self._place = place
        self._seconds = seconds
        self._step = step
        self._limit: Limit | None = None

    def __enter__(self) -> "Waiter":
        HERE.enter(self._place, self._step, in_wait=True)
        if self._seconds is not None:
            self._limit = Limit(self._seconds)
        return self

    def wait(self, arrays: Iterable[Any]) -> None:
        """Wait until the arrays are computed."""
        arrays = [array for array in arrays if not array.is_deleted()]
        if self._limit is not None and not _poll(arrays, self._limit):
            # If the collective could not be ended, blocking would take forever.
            return
        jax.block_until_ready(arrays)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._finish(error)
        finally:
            HERE.leave()

    def _finish(self, error: BaseException | None) -> None:
        limit = self._limit
        # Ctrl-C during the wait stays Ctrl-C.
        if limit is not None and limit.finish() and (error is None or isinstance(error, Exception)):
            raise describe_deadline(self._call, limit.seconds, limit.found) from error
        if isinstance(error, Exception) and is_collective_error(error):
            explained = explain_error(self._call, error, get_doctor())
            tell_blame(explained.processes)
            raise explained from error
        if isinstance(error, OtherProcessError):
            tell_blame(error.processes)


def _poll(arrays: list[Any], limit: Limit) -> bool:
    """Return whether all arrays were computed within the limit."""
    nap = _FIRST_NAP
    for array in arrays:
        while not is_ready(array):
            if time.monotonic() >= limit.end:
                limit.expire()
                # The doctor may have begun to expire the limit before; wait for it.
                limit.finish()
                return False
            time.sleep(nap)
            nap = min(nap * 1.3, _LONGEST_NAP)
    return True


def wait_until_ready(
    arrays: Iterable[Any], seconds: float | None, *, call: str, place: str
) -> None:
    """Wait until arrays are computed.

    Args:
        arrays: Arrays of JAX; deleted ones are skipped.
        seconds: How long to wait; None for no limit.
        call: What the user called, for errors.
        place: What reports say, such as "reduce (call 3)".

    Raises:
        DeadlineExceededError: `seconds` have passed, or a collective has reached XLA's limit.
        UnavailableError: Another process has ended.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxdist._processes import wait_until_ready
        >>> wait_until_ready([jnp.ones(3)], 60, call="reduce", place="reduce (call 1)")
    """
    with Waiter(call, place, seconds) as waiter:
        waiter.wait(arrays)


def report_deadline(call: str, seconds: float, error: OtherProcessError) -> OtherProcessError:
    """Return the error of a wait without a collective, with a report of which process is behind.

    Args:
        call: What was called.
        seconds: How long the call has waited.
        error: The error to return if nothing more is known.
    """
    doctor = get_doctor()
    if doctor is None or not isinstance(error, DeadlineExceededError):
        tell_blame(error.processes)
        return error
    try:
        table = doctor.observer.look_until_fresh()
    except Exception:
        return error
    # Processes that came are not behind, wherever they are now.
    named = {i: seen for i, seen in table.items() if i in error.processes}
    named[doctor.process.index] = table[doctor.process.index]
    found = diagnose(named, doctor.process.index)
    tell_blame(found.behind or error.processes)
    return describe_deadline(call, seconds, found) if found.behind else error


def exchange(call: str, channel: str, text: str, seconds: float | None, purpose: str) -> list[str]:
    """Return the strings of all processes; report meanwhile what this process waits for.

    Args:
        call: What was called, for errors.
        channel: Which exchange this is; see `Agreement.gather`.
        text: The string of this process.
        seconds: How long to wait; None means `collective_seconds`.
        purpose: What is exchanged.

    Raises:
        ContextError: This process has not joined a job.
        DeadlineExceededError: A process has not come in time; the error reports where it is.
        UnavailableError: A process has ended.
    """
    agreement = get_agreement()
    if agreement is None:
        raise ContextError(
            f"{call} compares {purpose} with other processes, and this process has joined none.\n\n"
            "The processes exchange it over their coordination service.\n\n"
            "Make the strategy by MultiWorkerMirroredStrategy, or call jax.distributed.initialize."
        )
    HERE.enter(f"exchanging {purpose}", in_wait=True)
    try:
        return exchange_over(agreement, call, channel, text, seconds, purpose)
    finally:
        HERE.leave()


def exchange_over(
    agreement: Agreement,
    call: str,
    channel: str,
    text: str,
    seconds: float | None,
    purpose: str,
    is_stopped: Callable[[], bool] = bool,
    needed_since: Callable[[], float | None] | None = None,
) -> list[str]:
    """Return the strings of all processes, without reporting what this process waits for.

    Args:
        agreement: The agreement of the job.
        call: As for `exchange`, like the next four.
        channel: Which exchange this is.
        text: The string of this process.
        seconds: How long to wait.
        purpose: What is exchanged.
        is_stopped: As for `Agreement.gather`.
        needed_since: As for `Agreement.gather`.

    Raises:
        ContextError: `is_stopped` returned True.
        DeadlineExceededError: A process has not come in time; the error reports where it is.
        UnavailableError: A process has ended.
    """
    limit = get_settings().collective_seconds if seconds is None else seconds
    try:
        return list(
            agreement.gather(
                channel,
                text,
                limit,
                purpose=purpose,
                is_stopped=is_stopped,
                needed_since=needed_since,
            )
        )
    except OtherProcessError as error:
        raise report_deadline(call, limit, error) from None


def tell_blame(processes: Iterable[int]) -> None:
    """Report to the other processes that this one leaves its collective because of some of them.

    Code that raises its own `OtherProcessError` calls this, so that reports do not name this
    process as the cause.
    """
    HERE.blame(processes)
    doctor = get_doctor()
    if doctor is not None:
        # Without the service the others cannot be reached.
        with contextlib.suppress(Exception):
            doctor.publish()


class CallOfAll:
    """Numbers the calls of one kind, which all processes make in the same order.

    Reports compare the numbers: a process with a lower number has not made the call yet.

    Args:
        name: What is called.

    Example:
        >>> from jaxdist._processes import CallOfAll
        >>> reductions = CallOfAll("reduce")
        >>> reductions.name_next(), reductions.name_next()
        ('reduce (call 1)', 'reduce (call 2)')
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers = itertools.count(1)

    def name_next(self) -> str:
        """Return the name of the next call, with its number."""
        return f"{self._name} (call {next(self._numbers)})"
