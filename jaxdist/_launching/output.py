"""Output of many processes, each line with the number of its process."""

import sys
from collections.abc import Callable
from typing import Any

from jaxdist._launching.noise import Noise

# A line that is longer is written in pieces, so that no process fills the launcher's memory.
MOST_BYTES_OF_A_LINE = 1 << 24
_TAIL = 1 << 18


class PrefixedOutput:
    """One output stream of one process, without the lines that `Noise` covers.

    Args:
        index: Number of the process, or its name.
        write: Called with whole lines. Their bytes are those of the process, in any encoding.
    """

    def __init__(self, index: int | str, write: Callable[[bytes], None]) -> None:
        self._prefix = f"[{index}] ".encode()
        self._write = write
        self._parts: list[bytes] = []  # of the line that is not complete
        self._held = 0
        self._tail = b""
        self._noise = Noise()

    def feed(self, chunk: bytes) -> None:
        """Take what the process wrote, and write the lines that it completes."""
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
        # The stream of a notebook takes text only.
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
