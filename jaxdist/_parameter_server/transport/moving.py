"""`MovingChannel`: a channel to a task whose address may change while it is used.

Note [Addresses that change]
The address of a task in TF_CONFIG is the name of the task, and stays the same for the whole job.
Where a task can be started again on another machine (on Ray), JAXDIST_ADDRESSES is the path of a
JSON file with the present address of each task, by that name:
{"10.0.0.1:5000": "10.0.0.2:6000"}. The launcher replaces the whole file at each change. Tasks that
connect or listen look there first; an address that is not in the file is used as it is.
"""

import json
import os
import pathlib
import threading
import time
from collections.abc import Callable

from jaxdist._parameter_server.transport.calls import get_seconds
from jaxdist._parameter_server.transport.message import Channel, Message
from jaxdist.errors import ClusterError, DeadlineExceededError, UnavailableError

_VARIABLE = "JAXDIST_ADDRESSES"
# How long one attempt waits for an address that the task may have left for good.
_TRY_SECONDS = 1.0


class Addresses:
    """The present addresses of tasks, as the launcher writes them.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = pathlib.Path(path)
        self._stamp: tuple[int, int] | None = None
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def find(self, address: str) -> str:
        """Return the present address of the task whose name is an address.

        Raises:
            ClusterError: The file does not exist, or does not hold addresses.
        """
        try:
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_ino
            with self._lock:
                if stamp != self._stamp:
                    read = json.loads(self._path.read_text())
                    self._known = {str(name): str(now) for name, now in read.items()}
                    self._stamp = stamp
                return self._known.get(address, address)
        except (OSError, ValueError, AttributeError) as error:
            raise ClusterError(
                f"The environment variable {_VARIABLE} is {str(self._path)!r}, which has no "
                f"addresses: {error}.\n\nThe launcher writes into this file where each task is.\n\n"
                f"Start the tasks with jaxdist launch, or unset {_VARIABLE}."
            ) from None


def find_addresses() -> Addresses | None:
    """Return the file of addresses that the environment names, if it names one."""
    path = os.environ.get(_VARIABLE)
    return Addresses(path) if path else None


class MovingChannel:
    """A channel that follows its task to another address; see Note [Addresses that change].

    Args:
        address: The name of the task: its first address.
        addresses: Where it is.
        make: Makes a channel to an address.
    """

    def __init__(self, address: str, addresses: Addresses, make: Callable[[str], Channel]) -> None:
        self._name, self._addresses, self._make = address, addresses, make
        self._now = addresses.find(address)
        self._channel = make(self._now)
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The present address of the other task."""
        return self._find().address

    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Call a method of the other task; see `Channel.call`."""
        return self._find().call(message, seconds)

    def call_briefly(self, message: Message, seconds: float | None = None) -> Message | None:
        """Call a method of the other task; see `Channel.call_briefly`."""
        return self._find().call_briefly(message, seconds)

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until the other task answers; see `Channel.wait_until_ready`."""
        deadline = time.monotonic() + get_seconds(seconds)
        while True:
            left = max(0.0, deadline - time.monotonic())
            channel = self._find()
            try:
                channel.wait_until_ready(min(left, _TRY_SECONDS))
            except DeadlineExceededError:
                if left <= _TRY_SECONDS:
                    raise
            except UnavailableError:
                # Another thread has found that the task has moved, and has closed this one.
                if self._is_closed or channel is self._channel:
                    raise
            else:
                return

    def close(self) -> None:
        """Close the connection; calls that wait raise `UnavailableError`."""
        with self._lock:
            self._is_closed = True
            self._channel.close()

    def _find(self) -> Channel:
        now = self._addresses.find(self._name)
        with self._lock:
            if now != self._now and not self._is_closed:
                # Calls that still wait there would wait in vain: closing ends them.
                old, self._channel, self._now = self._channel, self._make(now), now
                old.close()
            return self._channel
