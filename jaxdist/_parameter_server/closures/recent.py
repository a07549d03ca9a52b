"""`Recent`: a dict of the entries that were used last."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict that drops the entries that were not used for longest.

    A weak dict would not do: the program of a function refers to the function.

    Args:
        size: How many entries to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def find(
        self, key: K, make: Callable[[], V], is_current: Callable[[V], bool] = lambda _: True
    ) -> V:
        """Return an entry; make it if it is not there, or not current."""
        found = self._entries.get(key)
        if found is not None and not is_current(found):
            del self._entries[key]
            found = None
        if found is None:
            # An error in `make` leaves no entry.
            found = self._entries[key] = make()
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return found
