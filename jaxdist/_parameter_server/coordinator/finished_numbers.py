"""`FinishedNumbers`: which closures are finished, as one number and a small set."""


class FinishedNumbers:
    """Finds the number below which all closures are finished.

    Servers forget the closures below it. Numbers may finish in any order.

    Example:
        >>> from jaxdist._parameter_server.coordinator.finished_numbers import FinishedNumbers
        >>> finished = FinishedNumbers()
        >>> finished.add(2)
        >>> finished.below
        1
        >>> finished.add(1)
        >>> finished.below
        3
    """

    __slots__ = ("_later", "below")

    def __init__(self) -> None:
        self.below = 1
        self._later: set[int] = set()

    def add(self, number: int) -> None:
        """Note that a closure is finished, or that it will never run."""
        if number != self.below:
            self._later.add(number)
            return
        number += 1
        while number in self._later:
            self._later.remove(number)
            number += 1
        self.below = number
