"""Turns the error of a collective into an error that names the process that caused it."""

import time

from jaxdist._processes.watching.collective_errors import is_time_limit
from jaxdist._processes.watching.diagnosis import Diagnosis, diagnose, diagnose_lost
from jaxdist._processes.watching.doctor import Doctor
from jaxdist._processes.watching.observer import GONE, SILENT_SECONDS, has_launcher
from jaxdist.errors import DeadlineExceededError, OtherProcessError, UnavailableError

_NAP = 0.05
_SECONDS_OF_LAUNCHER = 1.0
# When a network has been down, TCP may take some seconds to resend what was lost, such as the
# packet that closes the connection of an ended process.
_SECONDS_OF_NETWORK = 3.0
_RULE = "All processes take part in each collective, so it cannot complete without one of them."


def explain_error(call: str, error: Exception, doctor: Doctor | None) -> OtherProcessError:
    """Return the error that says which process made a collective fail.

    Cost:
        A process that ended on this machine, or that wrote why it ends, is found at once. One on
        another machine is found when it has sent no news for 3 s.

    Args:
        call: What was called.
        error: The error of the collective.
        doctor: The doctor of this process; None if the process has joined no job.
    """
    found = Diagnosis((), "The processes of this job are not watched.")
    if doctor is not None:
        try:
            found = _find_cause(error, doctor)
        except Exception as unreachable:
            found = Diagnosis((), f"The coordination service did not answer: {unreachable}")
    message = (
        f"{call}: {found.text}\n\n{_RULE} JAX says: {str(error).splitlines()[0]}\n\n"
        "This process can go on without collectives: save what it has, then start the job again."
    )
    if found.have_ended or not (is_time_limit(error) or found.behind):
        return UnavailableError(message, found.behind)
    return DeadlineExceededError(message, found.behind)


def describe_deadline(call: str, seconds: float, found: Diagnosis) -> DeadlineExceededError:
    """Return the error of a call whose time limit has passed."""
    return DeadlineExceededError(
        f"{call} has waited for {seconds:g} s: {found.text}\n\n"
        f"{_RULE} The limit is timeout_seconds={seconds:g}.\n\n"
        "Look at what that process does; pass a larger timeout_seconds if it only needs more time. "
        "Collectives between these processes fail from now on: save, then start the job again.",
        found.behind,
    )


def _find_cause(error: Exception, doctor: Doctor) -> Diagnosis:
    own = doctor.process.index
    if is_time_limit(error):
        return diagnose(doctor.observer.look_until_fresh(), own)
    # The connection of a process closes a little before its end can be seen.
    end = time.monotonic() + SILENT_SECONDS + _SECONDS_OF_NETWORK
    while True:
        table = doctor.observer.look()
        found = diagnose_lost(table, own)
        if time.monotonic() >= end:
            return found
        if found.behind:
            # A launcher notes the signal or exit code a little after the process has ended.
            if not (has_launcher() and any(table[i].ended == GONE for i in found.behind)):
                return found
            end = min(end, time.monotonic() + _SECONDS_OF_LAUNCHER)
        time.sleep(_NAP)
