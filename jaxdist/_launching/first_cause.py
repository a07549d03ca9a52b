"""Finds which process failed first, and which errors only followed from it."""

import dataclasses
import re
import signal
from collections.abc import Sequence

from jaxdist._launching.child import End

_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# JAX's C++ code writes such lines after the traceback, while the interpreter ends.
_NOT_OF_IT = re.compile(r"^(?:[IWEF]\d{4} |\*\*\* |terminate called|Exception ignored )")
_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")

# When another process is gone, JAX raises a RuntimeError, or a ValueError if the failure happens
# during dispatch.
_COLLECTIVE_FAILED = re.compile(r"\bGloo [\w -]+ failed|\bNCCL (?:operation|error)")
_OTHERS_IN_JAX = re.compile(
    r"Connection (?:closed|reset) by peer|oordination service|UNAVAILABLE|DEADLINE_EXCEEDED"
    r"|heartbeat"
)
_OURS = {"jaxdist.errors.UnavailableError", "jaxdist.errors.DeadlineExceededError"}
_NUMBERS = re.compile(r"\bprocess(?:es)? (?P<numbers>\d+(?:(?:, | and |, and )\d+)*)")


@dataclasses.dataclass(frozen=True)
class Traceback:
    """A traceback in the output of a process.

    Attributes:
        text: All of it, with the tracebacks of the exceptions that led to it.
        raised: Name of the last exception's class, with its module.
        is_about_others: Whether the end or the silence of another process caused it.
        processes: Numbers of these processes, if the message names them.
    """

    text: str
    raised: str
    is_about_others: bool
    processes: tuple[int, ...]


def find_last_traceback(written: str) -> Traceback | None:
    """Return the last traceback of an output, with the exceptions that led to it."""
    lines = written.splitlines()
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return None
    position = len(headers) - 1
    while position and _follows_from_another(lines, headers[position]):
        position -= 1
    block = _cut_end(lines[headers[position] :])
    raised = [match for match in map(_RAISED.match, block) if match]
    # Lines of one word in a chain or a message also match.
    ours = [match for match in raised if match["name"] in _OURS]
    text = "\n".join(block)
    last = _last_exception(block)
    messages = "\n".join(line for line in block if not line.startswith(" "))
    is_from_jax = last.endswith("RuntimeError") and bool(_OTHERS_IN_JAX.search(messages))
    about = bool(ours) or is_from_jax or bool(_COLLECTIVE_FAILED.search(messages))
    named = _find_processes(ours[0]["message"] or "") if ours else ()
    return Traceback(text, last, about, named)


def _follows_from_another(lines: Sequence[str], header: int) -> bool:
    before = next((line for line in reversed(lines[:header]) if line.strip()), "")
    return before in _CHAIN


def _cut_end(block: Sequence[str]) -> list[str]:
    ends = [number for number, line in enumerate(block) if _NOT_OF_IT.match(line)]
    kept = list(block[: ends[0]] if ends else block)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept


def _last_exception(block: Sequence[str]) -> str:
    """Return the class of the exception, from the first line that is not indented."""
    last = max(number for number, line in enumerate(block) if _HEADER.match(line))
    for line in block[last + 1 :]:
        match = _RAISED.match(line)
        if match and not line.startswith(" "):
            return match["name"]
    return ""


def _find_processes(message: str) -> tuple[int, ...]:
    match = _NUMBERS.search(message)
    return tuple(map(int, re.findall(r"\d+", match["numbers"]))) if match else ()


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
