"""Finds which process failed first, and which errors only followed from it."""

import dataclasses
import signal
from collections.abc import Sequence

from jaxdist._launching.ends import End
from jaxdist._launching.first_cause.tracebacks import find_last_traceback

_LINES = 20  # of a process that left no traceback


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first cause of a job's failure.

    Attributes:
        index: Number of the process that is the cause.
        exit_code: The code that the launcher exits with.
        text: What happened, for the user.
    """

    index: int
    exit_code: int
    text: str


@dataclasses.dataclass(frozen=True)
class _Reading:
    end: End
    is_about_others: bool
    processes: tuple[int, ...]
    text: str


def find_first_cause(ends: Sequence[End]) -> Cause | None:
    """Return the first cause; None if all processes ended with code 0.

    Args:
        ends: How each process ended, the earliest first.
    """
    failed = _read_failed(ends)
    if not failed:
        return None
    by_itself = next((reading for reading in failed if not reading.is_about_others), None)
    if by_itself is not None:
        return _describe_failure(by_itself)
    return _find_silent_cause(failed, ends)


def find_lost(ends: Sequence[End]) -> tuple[int, ...]:
    """Return the processes that a job has lost: the first cause, and others that failed alone.

    All other processes failed or were ended only because of these.

    Args:
        ends: How each process ended, the earliest first.
    """
    cause = find_first_cause(ends)
    if cause is None:
        return ()
    failed = _read_failed(ends)
    alone = {reading.end.index for reading in failed if not reading.is_about_others}
    named = {number for reading in failed for number in reading.processes}
    # The processes that waited for one that did not answer, or had left, named it.
    silent = {end.index for end in ends if end.was_ended or end.code == 0} & named
    return tuple(sorted({cause.index, *alone, *silent}))


def _read_failed(ends: Sequence[End]) -> list[_Reading]:
    return [_read(end) for end in ends if end.code != 0 and not end.was_ended]


def _find_silent_cause(failed: Sequence[_Reading], ends: Sequence[End]) -> Cause:
    """Return the cause if every failed process reports that another one is the cause."""
    first = failed[0]
    by_index = {end.index: end for end in ends}
    named = [by_index[n] for reading in failed for n in reading.processes if n in by_index]
    waited = ", ".join(str(reading.end.index) for reading in failed)
    hung = next((end for end in named if end.was_ended), None)
    # JAX's own errors name no process. Then the cause left before the first of them.
    names_nobody = not any(reading.processes for reading in failed)
    left_before = ends[: ends.index(first.end)] if names_nobody else named
    left = next((end for end in left_before if end.code == 0), None)
    if left is not None:
        return Cause(
            left.index,
            1,
            f"process {left.index} ended with exit code 0 in the middle of the job.\n"
            f"Still at work, and in need of it: {waited}. Look for an early return, a loop "
            "with fewer steps than elsewhere, or sys.exit().",
        )
    if hung is not None:
        return Cause(
            hung.index,
            first.end.exit_code,
            f"process {hung.index} did not answer, and was ended after the others had waited for "
            f"it. What process {first.end.index} found:\n{first.text}",
        )
    return _describe_failure(first)


def _read(end: End) -> _Reading:
    if end.record is not None:
        record = end.record
        return _Reading(end, record.is_about_others, record.processes, record.text)
    found = find_last_traceback(end.tail)
    if end.code < 0:
        # JAX's client aborts the process when the coordination service reports a death.
        aborted = -end.code == signal.SIGABRT and "oordination service" in end.tail
        return _Reading(end, aborted, (), _last_lines(end.tail))
    if found is None:
        return _Reading(end, False, (), _last_lines(end.tail))
    return _Reading(end, found.is_about_others, found.processes, found.text)


def _last_lines(tail: str) -> str:
    return "\n".join(tail.rstrip().splitlines()[-_LINES:])


def _describe_failure(reading: _Reading) -> Cause:
    end = reading.end
    if end.code < 0:
        how = f"process {end.index} was ended by {end.describe()}"
        hint = (
            "\nThe system sends SIGKILL when memory runs out (`dmesg` then says so); otherwise "
            "a user or another program sent it."
            if -end.code == signal.SIGKILL
            else ""
        )
        wrote = f"\nIts last lines on standard error:\n{reading.text}" if reading.text else ""
        return Cause(end.index, end.exit_code, f"{how}.{hint}{wrote}")
    how = f"process {end.index} failed first, with exit code {end.code}"
    text = f"{how}:\n{reading.text}" if reading.text else f"{how}. It wrote no error."
    return Cause(end.index, end.exit_code, text)
