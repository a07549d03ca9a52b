"""Writes the output of many processes, each line with the number of its process."""

import re
import sys
from collections.abc import Callable
from typing import Any

# Longer lines are written in pieces, so that no process fills the launcher's memory.
MOST_BYTES_OF_A_LINE = 1 << 24
_TAIL = 1 << 18

# Lines of JAX's libraries that mean nothing. None of them could say anything about a failure.
# Several threads of gloo write their messages in pieces at the same time, so one line can hold
# pieces of two messages, and the next line the rest or nothing.
_GLOO_PIECES = (
    rb"\[Gloo\] Rank ",
    rb" is connected to ",
    rb" peer ranks\. ",
    rb"Expected number of connected peer ranks is : ",
)
_GLOO = re.compile(rb"(?:" + rb"|".join((*_GLOO_PIECES, rb"\d+")) + rb")+")
_GLOO_TEXT = re.compile(rb"|".join(_GLOO_PIECES))
_LINES = (
    # jaxdist itself makes the processes leave after all are ready.
    re.compile(
        rb"W\d{4} [\d:.]+ +\d+ coordination_service\.cc:\d+\] (?:\[\d+\] )?"
        rb"Using experimental recoverable task feature\. .*"
    ),
)


class Noise:
    """Recognizes lines without meaning in one output stream of one process.

    Example:
        >>> from jaxdist._launching.output import Noise
        >>> noise = Noise()
        >>> noise.covers(b"[Gloo] Rank 0 is connected to 1 peer ranks. "
        ...     b"Expected number of connected peer ranks is : 1")
        True
        >>> noise.covers(b"[Gloo] Rank 0 is connected to 0 peer ranks of 3")
        False
    """

    def __init__(self) -> None:
        # Number of line ends still to come from messages of gloo that were seen in part.
        self._open = 0

    def covers(self, line: bytes) -> bool:
        """Whether a line, without its line end, means nothing. Pass the lines in order."""
        if _GLOO.fullmatch(line) and _GLOO_TEXT.search(line):
            self._open = max(0, self._open + line.count(b"[Gloo] Rank ") - 1)
            return True
        if not line and self._open:
            self._open -= 1
            return True
        return any(pattern.fullmatch(line) for pattern in _LINES)


class PrefixedOutput:
    """One output stream of one process, without the lines that `Noise` covers.

    Args:
        index: Number of the process, or its name.
        write: Called with whole lines, as the bytes that the process wrote, in any encoding.
    """

    def __init__(self, index: int | str, write: Callable[[bytes], None]) -> None:
        self._prefix = f"[{index}] ".encode()
        self._write = write
        self._parts: list[bytes] = []  # of the line that is not complete
        self._held = 0
        self._tail = b""
        self._noise = Noise()

    def feed(self, chunk: bytes) -> None:
        """Take output of the process, and write the lines that it completes."""
        self._tail = (self._tail + chunk)[-_TAIL:]
        complete, newline, rest = chunk.rpartition(b"\n")
        if newline:
            lines = (b"".join(self._parts) + complete).split(b"\n")
            kept = [line for line in lines if not self._noise.covers(line)]
            if kept:
                self._write(b"".join(self._prefix + line + b"\n" for line in kept))
            self._parts.clear()
            self._held = 0
        if rest:
            self._parts.append(rest)
            self._held += len(rest)
        if self._held > MOST_BYTES_OF_A_LINE:
            self.finish()

    def finish(self) -> None:
        """Write the last line, if it has no end."""
        if self._parts:
            self._write(self._prefix + b"".join(self._parts) + b"\n")
            self._parts.clear()
            self._held = 0

    def read_tail(self) -> str:
        """Return the end of what the process wrote, without prefixes."""
        return self._tail.decode(errors="replace")


def write_to(stream: Any) -> Callable[[bytes], None]:
    """Return a function that writes bytes to a text stream such as `sys.stdout`."""

    def write(content: bytes) -> None:
        # The stream of a notebook takes only strings.
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(content.decode(errors="replace"))
        else:
            stream.flush()
            buffer.write(content)
        stream.flush()

    return write


def say(text: str) -> None:
    """Print a message of the launcher itself."""
    print(f"jaxdist launch: {text}", file=sys.stderr, flush=True)
