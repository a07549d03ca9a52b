"""`CallOfAll`: the number of a call that all processes make."""

import itertools


class CallOfAll:
    """Numbers the calls of one kind, which all processes make in the same order.

    A report compares the numbers: a process with a lower one has not made the call yet.

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
