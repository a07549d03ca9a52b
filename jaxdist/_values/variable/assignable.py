"""`Assignable`: objects that checkpoints save as one array and restore by assigning."""

from typing import Any


class Assignable:
    """A base class of variables, which are saved as one plain array.

    A checkpoint saves `read_value()`, and restores by `assign(array)`. It does not record how the
    value is placed, so a variable may be restored onto other devices or another number of shards.
    """

    __slots__ = ()

    def read_value(self) -> Any:
        """Return the value as one array."""
        raise NotImplementedError

    def assign(self, value: Any) -> Any:
        """Replace the value with an array of the same shape."""
        raise NotImplementedError
