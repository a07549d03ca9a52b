"""Reads the last traceback from the output of a process."""

import dataclasses
import re
from collections.abc import Sequence

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
