"""`ArrayWait`: whether a thread sleeps in `float(array)` or a similar call of JAX."""

import threading
import time

from jaxdist._processes.watching.stacks.thread_stack import is_in_array_wait
from jaxdist._processes.watching.whereabouts import Doing

_NAP = 0.03
_Rest = tuple[str, str] | None


class ArrayWait:
    """Finds out for how long a thread has been waiting for an array, outside of jaxdist.

    Results of a step are arrays before they are computed, so a collective that is stuck often shows
    in the user's own `float(array)`. A thread that sleeps in one such call uses no processor time
    and does not wake; one that calls it again and again does.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._since = 0.0

    def measure(self, doing: Doing) -> float | None:
        """Return the seconds that the thread has waited, or None if it does not wait.

        Cost:
            30 ms of sleep while the thread is in such a call.
        """
        rest = self._read_rest(doing.thread)
        key = (doing.thread, doing.since, rest)
        if key == self._key:
            if is_in_array_wait(doing.thread):
                return time.monotonic() - self._since
        elif is_in_array_wait(doing.thread):
            time.sleep(_NAP)
            if self._read_rest(doing.thread) == rest and is_in_array_wait(doing.thread):
                self._key, self._since = key, time.monotonic() - _NAP
                return _NAP
        self._key = None
        return None

    def _read_rest(self, thread: int) -> _Rest:
        """Return what stays equal while a thread sleeps; None where the system does not say."""
        native = next((t.native_id for t in threading.enumerate() if t.ident == thread), None)
        try:
            with open(f"/proc/self/task/{native}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/self/task/{native}/status") as file:
                switches = [line for line in file if "voluntary_ctxt" in line]
        except OSError:
            return None
        # Processor time in user and kernel mode.
        return " ".join(fields[11:13]), " ".join(switches)
