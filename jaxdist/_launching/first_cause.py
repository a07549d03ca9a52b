"""Finds which process failed first, and which errors only followed from it."""

import dataclasses
import re
import signal
from collections.abc import Sequence

from jaxdist._launching.child import End, Record

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


def find_last_traceback(written: str) -> Record | None:
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
    return Record(about, named, text)


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


def find_first_cause(ends: Sequence[End]) -> Cause | None:
    """Return the first cause; None if all processes ended with code 0.

    Args:
        ends: How each process ended, the earliest first.
    """
    failed = _read_failed(ends)
    if not failed:
        return None
    by_itself = next(((end, found) for end, found in failed if not found.is_about_others), None)
    if by_itself is not None:
        return _describe_failure(*by_itself)
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
    alone = {end.index for end, found in failed if not found.is_about_others}
    named = {number for _, found in failed for number in found.processes}
    # The processes that waited for one that did not answer, or had left, named it.
    silent = {end.index for end in ends if end.was_ended or end.code == 0} & named
    return tuple(sorted({cause.index, *alone, *silent}))


def _read_failed(ends: Sequence[End]) -> list[tuple[End, Record]]:
    """Return the processes that failed by themselves, and the error of each."""
    return [(end, _read(end)) for end in ends if end.code != 0 and not end.was_ended]


def _find_silent_cause(failed: Sequence[tuple[End, Record]], ends: Sequence[End]) -> Cause:
    """Return the cause if every failed process reports that another one is the cause."""
    first, first_found = failed[0]
    by_index = {end.index: end for end in ends}
    named = [by_index[n] for _, found in failed for n in found.processes if n in by_index]
    waited = ", ".join(str(end.index) for end, _ in failed)
    hung = next((end for end in named if end.was_ended), None)
    # JAX's own errors name no process. Then the cause left before the first of them.
    names_nobody = not any(found.processes for _, found in failed)
    left_before = ends[: ends.index(first)] if names_nobody else named
    left = next((end for end in left_before if end.code == 0), None)
    if left is not None:
        return Cause(
            left.index,
            1,
            f"process {left.index} ended with exit code 0 in the middle of the job.\n"
            f"Processes that still needed it: {waited}. Look for an early return, a loop with "
            "fewer steps than elsewhere, or sys.exit().",
        )
    if hung is not None:
        return Cause(
            hung.index,
            first.exit_code,
            f"process {hung.index} did not answer, and was ended after the others had waited for "
            f"it. What process {first.index} found:\n{first_found.text}",
        )
    return _describe_failure(first, first_found)


def _read(end: End) -> Record:
    """Return what ended a process, as it recorded itself or as its output shows."""
    if end.record is not None:
        return end.record
    found = find_last_traceback(end.tail) if end.code >= 0 else None
    # JAX's client aborts the process when the coordination service reports a death.
    aborted = -end.code == signal.SIGABRT and "oordination service" in end.tail
    lines = end.tail.rstrip().splitlines()[-_LINES:]
    return found or Record(aborted, (), "\n".join(lines))


def _describe_failure(end: End, found: Record) -> Cause:
    if end.code < 0:
        how = f"process {end.index} was ended by {end.describe()}"
        hint = (
            "\nThe system sends SIGKILL when memory runs out (`dmesg` then says so); otherwise "
            "a user or another program sent it."
            if -end.code == signal.SIGKILL
            else ""
        )
        wrote = f"\nIts last lines on standard error:\n{found.text}" if found.text else ""
        return Cause(end.index, end.exit_code, f"{how}.{hint}{wrote}")
    how = f"process {end.index} failed first, with exit code {end.code}"
    text = f"{how}:\n{found.text}" if found.text else f"{how}. It wrote no error."
    return Cause(end.index, end.exit_code, text)
