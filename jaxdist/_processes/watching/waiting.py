"""`Waiter`: a call that waits for other processes, with a time limit."""

import contextlib
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import jax

from jaxdist._processes.watching.collective_errors import is_collective_error
from jaxdist._processes.watching.current import get_doctor
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose
from jaxdist._processes.watching.explain import describe_deadline, explain_error
from jaxdist._processes.watching.sockets import cut_collectives
from jaxdist._processes.watching.whereabouts import HERE

_FIRST_NAP = 20e-6
_LONGEST_NAP = 1e-3
# The caller ends its own wait; the doctor's thread does so while the caller is inside of C++ code.
_GRACE_SECONDS = 0.05
_MOST_SECONDS_TO_DIAGNOSE = 10.0


class Waiter:
    """A context in which this process waits for the others.

    Errors of collectives become `UnavailableError` or `DeadlineExceededError`, which name the
    process that caused them. When `seconds` have passed, the collective is ended: see Note
    [Stuck collectives]. That also works while JAX runs the collective inside of the call that
    dispatches it, as it does for small programs on CPU.

    Cost:
        About 2 us without `seconds`. With them, waiting by polling takes up to 1 ms longer.

    Args:
        call: What the user called, for errors.
        place: What reports say, such as "reduce (call 3)".
        seconds: How long the context may take; None for no limit.
        step: Number of the step, if one is known.

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
        self._lock = threading.Lock()
        self._is_expiring = False
        self._is_done = False
        self._has_expired = threading.Event()
        self._found = Diagnosis((), "This process has joined no other processes.")
        self._end = float("inf")

    @property
    def ends_at(self) -> float:
        """When the doctor ends the wait, by `time.monotonic`."""
        return self._end + _GRACE_SECONDS

    def __enter__(self) -> "Waiter":
        HERE.enter(self._place, self._step, in_wait=True)
        if self._seconds is not None:
            self._end = time.monotonic() + self._seconds
            doctor = get_doctor()
            if doctor is not None:
                doctor.watch_limit(self)
        return self

    def wait(self, arrays: Iterable[Any]) -> None:
        """Wait until the arrays are computed."""
        arrays = [array for array in arrays if not array.is_deleted()]
        if self._seconds is not None:
            self._poll(arrays)
        jax.block_until_ready(arrays)

    def expire(self) -> None:
        """Find out who is behind, and end the collectives of this process."""
        with self._lock:
            if self._is_expiring or self._is_done:
                return
            self._is_expiring = True
        doctor = get_doctor()
        try:
            if doctor is not None:
                table = doctor.observer.look_until_fresh()
                self._found = diagnose(table, doctor.process.index)
                HERE.blame(self._found.behind)
                # Before the connections close: the others then see whom to name.
                doctor.publish()
        except Exception as error:
            self._found = Diagnosis((), f"The coordination service did not answer: {error}")
        finally:
            cut_collectives()
            self._has_expired.set()

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
        if self._seconds is not None:
            doctor = get_doctor()
            if doctor is not None:
                doctor.forget_limit(self)
            with self._lock:
                self._is_done = True
            if self._is_expiring and (error is None or isinstance(error, Exception)):
                self._has_expired.wait(_MOST_SECONDS_TO_DIAGNOSE)
                raise describe_deadline(self._call, self._seconds, self._found) from error
        if isinstance(error, Exception) and is_collective_error(error):
            explained = explain_error(self._call, error, get_doctor())
            tell_blame(explained.processes)
            raise explained from error

    def _poll(self, arrays: list[Any]) -> None:
        nap = _FIRST_NAP
        for array in arrays:
            while not array.is_ready():
                if time.monotonic() >= self._end:
                    self.expire()
                    self._has_expired.wait(_MOST_SECONDS_TO_DIAGNOSE)
                    return
                time.sleep(nap)
                nap = min(nap * 1.3, _LONGEST_NAP)


def wait_until_ready(
    arrays: Iterable[Any], seconds: float | None, *, call: str, place: str
) -> None:
    """Wait until arrays are computed.

    Args:
        arrays: Arrays of JAX; those that are deleted are left out.
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


def tell_blame(processes: Iterable[int]) -> None:
    """Tell the other processes that this one leaves its collective because of some of them.

    A caller that raises an `OtherProcessError` of its own calls this, so that nobody takes this
    process for the cause.
    """
    HERE.blame(processes)
    doctor = get_doctor()
    if doctor is not None:
        # Without the service there is nobody to tell.
        with contextlib.suppress(Exception):
            doctor.publish()
