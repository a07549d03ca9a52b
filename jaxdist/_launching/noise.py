"""Lines of JAX's libraries that mean nothing, and that a launcher leaves out.

The list is short and exact: a line that could say something about a failure is never left out.
"""

import re

# Several threads of gloo write the pieces of this message at once, so one line can have the pieces
# of two, and the next line the rest or nothing.
_GLOO_PIECES = (
    rb"\[Gloo\] Rank ",
    rb" is connected to ",
    rb" peer ranks\. ",
    rb"Expected number of connected peer ranks is : ",
)
_GLOO = re.compile(rb"(?:" + rb"|".join((*_GLOO_PIECES, rb"\d+")) + rb")+")
_GLOO_TEXT = re.compile(rb"|".join(_GLOO_PIECES))
_LINES = (
    # jaxdist leaves the others itself, after all are ready.
    re.compile(
        rb"W\d{4} [\d:.]+ +\d+ coordination_service\.cc:\d+\] (?:\[\d+\] )?"
        rb"Using experimental recoverable task feature\. .*"
    ),
)


class Noise:
    """Tells which lines of one output stream of one process mean nothing.

    Example:
        >>> from jaxdist._launching.noise import Noise
        >>> noise = Noise()
        >>> noise.covers(b"[Gloo] Rank 0 is connected to 1 peer ranks. "
        ...     b"Expected number of connected peer ranks is : 1")
        True
        >>> noise.covers(b"[Gloo] Rank 0 is connected to 0 peer ranks of 3")
        False
    """

    def __init__(self) -> None:
        # Ends of lines that messages of gloo, of which a part was seen, have still to write.
        self._open = 0

    def covers(self, line: bytes) -> bool:
        """Whether a line, without its end, means nothing. Lines are given in their order."""
        if _GLOO.fullmatch(line) and _GLOO_TEXT.search(line):
            self._open = max(0, self._open + line.count(b"[Gloo] Rank ") - 1)
            return True
        if not line and self._open:
            self._open -= 1
            return True
        return any(pattern.fullmatch(line) for pattern in _LINES)
