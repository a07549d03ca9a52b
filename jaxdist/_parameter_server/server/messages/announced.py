"""`Announced`: the workers that have told a server that they are there."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

# A worker tells it every 2 s, so that one that has ended is forgotten soon.
_KEEP_SECONDS = 10.0
_MOST = 1024


class Announced:
    """The workers that have told a server that they are there.

    A coordinator asks for them, and takes those that its cluster does not list. They are in no
    snapshot: each worker tells it again and again.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The newest is the last one.
        self._found: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def note(self, worker: int, address: str) -> None:
        """Note that a worker is there.

        Args:
            worker: Its index.
            address: Where a coordinator reaches it.
        """
        with self._lock:
            self._found[worker] = address, self._clock()
            self._found.move_to_end(worker)
            while len(self._found) > _MOST:
                self._found.popitem(last=False)

    def list_present(self) -> dict[int, str]:
        """Return the address of each worker that was heard of in the last 10 s."""
        with self._lock:
            since = self._clock() - _KEEP_SECONDS
            return {n: address for n, (address, when) in self._found.items() if when >= since}
