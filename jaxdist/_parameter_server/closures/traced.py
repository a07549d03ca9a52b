"""`Traced`: a closure after its trace; and `Recent`, a dict of what was used last."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jaxdist._parameter_server.worker_protocol import TracedClosure


@dataclasses.dataclass(frozen=True)
class Traced:
    """A closure, and how the results of its program become what the function returns.

    Args:
        closure: The closure, as workers get it.
        treedef: The structure of the new state of NNX objects, and of what the function returns.
        num_state: How many leaves of it are state.
    """

    closure: TracedClosure
    treedef: Any
    num_state: int

    def build(self, results: Sequence[Any]) -> Any:
        """Return what the function returns."""
        return self.treedef.unflatten([*[None] * self.num_state, *results])[1]


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A dict that drops the least recently used entries.

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
