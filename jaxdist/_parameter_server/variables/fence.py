"""`Fence`: a number that tells workers when to read variables again.

Note [Fence]
A worker keeps the values of variables that came with the reply to its last changes. They may be
old, because other workers change variables too. Nobody can tell as long as nobody knows of a newer
value. So each closure carries the fence, and the fence increases whenever the program of the
coordinator learns something: at join, done, fetch, and at its own reads and changes of variables.
A worker that kept values from before the fence of a closure reads again.

The fence is read when a closure begins to run, not when it is scheduled: what was learned between
the two counts as well.
"""

import threading


class Fence:
    """A number that only increases. All threads may use it.

    Example:
        >>> from jaxdist._parameter_server.variables.fence import Fence
        >>> fence = Fence()
        >>> fence.advance()
        >>> fence.value
        1
    """

    __slots__ = ("_lock", "value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def advance(self) -> None:
        """Increase the number."""
        with self._lock:
            self.value += 1
