"""Workers that join while a training runs: in this process, or as other tasks; and their end."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from jaxdist._called import called, refuse
from jaxdist._parameter_server.coordinator import WorkerLink, call_at_exit
from jaxdist._parameter_server.protocol import Hello, ListAnnounced
from jaxdist._parameter_server.strategy.links import LocalWorkerLink, RemoteWorkerLink
from jaxdist._parameter_server.transport import Channel, connect
from jaxdist._parameter_server.transport.requests import call
from jaxdist._parameter_server.worker_protocol import End
from jaxdist._processes import get_settings
from jaxdist._validate import show
from jaxdist.errors import (
    ClusterError,
    DeadlineExceededError,
    JaxdistError,
    UnavailableError,
    UnsupportedError,
    WorkerUnavailableError,
)

_LOG = logging.getLogger("jaxdist")
_CALL_SECONDS = 5.0
_ADD = "ClusterCoordinator.add_worker"
_ASK_SECONDS = 5.0
_GONE = (DeadlineExceededError, UnavailableError, WorkerUnavailableError)


# A strategy may be deleted long before the process ends, and another one made that the same workers
# take part in. So they are notified when the process ends, over connections of their own.
_ENDINGS: dict[str, str] = {}  # the coordinator's run that a worker works for now, by its address


def _tell_ends() -> None:
    """Tell the workers at once; wait up to 5 s for those that do not answer."""
    threads = [
        threading.Thread(target=_tell_end, args=pair, name="jaxdist-ending", daemon=True)
        for pair in list(_ENDINGS.items())
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _CALL_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _tell_end(address: str, client: str) -> None:
    channel = connect(address, layer="grpc", name=f"the worker at {address}")
    try:
        call(channel, End(client), _CALL_SECONDS)
    except JaxdistError as error:
        # It has ended already, or works for another coordinator.
        _LOG.debug("The worker at %s was not told that the training has ended: %s", address, error)
    finally:
        channel.close()


call_at_exit(_tell_ends)


class LocalJoining:
    """Adds workers in this process.

    Args:
        links: The connections to all workers; new ones are added to this list.
        make: Makes the connection to the worker of an index.

    Attributes:
        has_announcements: False: nobody else adds workers to this process.
    """

    has_announcements = False

    def __init__(
        self, links: list[LocalWorkerLink], make: Callable[[int], LocalWorkerLink]
    ) -> None:
        self._links, self._make = links, make
        self._lock = threading.Lock()

    @called(_ADD)
    def add(self, address: str | None) -> tuple[WorkerLink, bool]:
        """Add a worker; return the connection to it, and that it is new.

        Raises:
            ArgumentError: An address was given.
            DeviceError: The replicas of the worker need more devices than there are.
        """
        if address is not None:
            raise refuse(
                f"address={show(address)}, and all workers of the cluster are in this process.",
                "They have no addresses.",
                f"Call {_ADD}().",
            )
        with self._lock:
            link = self._make(len(self._links))
            self._links.append(link)
        return link, True

    def find_new(self) -> Sequence[WorkerLink]:
        """Return nothing."""
        return ()


class RemoteJoining:
    """Connects to workers that were started later than the training.

    Args:
        links: The connections to all workers; new ones are added to this list.
        channels: All channels of the strategy, to which those of new workers are added.
        make: Makes the connection to the worker of an index, over a channel.
        server: The channel to the first parameter server, to which new workers announce themselves.

    Attributes:
        has_announcements: True: workers can announce themselves.
    """

    has_announcements = True

    def __init__(
        self,
        links: list[RemoteWorkerLink],
        channels: list[Channel],
        make: Callable[[int, Channel], RemoteWorkerLink],
        server: Channel,
    ) -> None:
        self._links, self._channels, self._make, self._server = links, channels, make, server
        self._lock = threading.Lock()
        # The announcements that were answered; one that was refused is reported once.
        self._answered: set[tuple[int, str]] = set()

    @called(_ADD)
    def add(self, address: str | None) -> tuple[WorkerLink, bool]:
        """Connect to the worker at an address; return the connection, and whether it is new.

        Raises:
            ArgumentError: The address is not valid, or was not given.
            ClusterError: Another task is there, or a worker with the index of another one.
            DeadlineExceededError: Nobody answers there within `JAXDIST_JOIN_SECONDS`.
            UnsupportedError: The worker has devices of another platform than the others.
        """
        if address is None:
            raise refuse(
                "no address, and the workers of the cluster are processes of their own.",
                "A worker is reached at its address.",
                "Start it with `jaxdist server --type worker --index N`, and pass "
                "address='host:port'.",
            )
        return self._connect(address, get_settings().join_seconds)

    def find_new(self) -> Sequence[WorkerLink]:
        """Return the connections to workers that have announced themselves since the last call."""
        try:
            reply = call(self._server, ListAnnounced(), _ASK_SECONDS)
        except JaxdistError as error:
            # The next call that needs the server raises its error.
            _LOG.debug("ps 0 was not asked for new workers: %s", error)
            return ()
        found = []
        for index, address in reply.workers.items():
            if (index, address) in self._answered:
                continue
            try:
                link, is_new = self._connect(address, _ASK_SECONDS)
            except _GONE as error:
                # It announces itself again, if it is still there.
                _LOG.info("Worker %d at %s has not joined yet: %s", index, address, error)
                continue
            except JaxdistError as error:
                self._answered.add((index, address))
                _LOG.warning(
                    "Worker %d at %s has announced itself, and cannot join: %s",
                    index,
                    address,
                    error,
                )
                continue
            self._answered.add((index, address))
            _ENDINGS[address] = link.client
            if is_new:
                found.append(link)
        return found

    def _connect(self, address: str, seconds: float) -> tuple[RemoteWorkerLink, bool]:
        channel = connect(address, layer="grpc", name=f"the worker at {address}")
        try:
            channel.wait_until_ready(seconds)
            # Without a list of servers a worker only answers who it is, as servers do.
            index = _read_index(address, call(channel, Hello()).task)
            with self._lock:
                for link in self._links:
                    if link.index == index:
                        # Both are where the task is now, on Ray too.
                        _check_same(link, channel.address)
                        channel.close()
                        return link, False
                link = self._make(index, channel)
                link.hello()
                self._check_platform(link, address)
                self._channels.append(channel)
                self._links.append(link)
        except BaseException:
            channel.close()
            raise
        return link, True

    def _check_platform(self, link: RemoteWorkerLink, address: str) -> None:
        present = sorted({other.platform for other in self._links})
        if link.platform not in present:
            raise UnsupportedError(
                f"The worker at {address} computes on {link.platform!r}, and the other workers of "
                f"the training on {present}.\n\n"
                "The functions that the coordinator has traced are compiled for the platforms of "
                "the workers that were there at the start.\n\n"
                f"Start the worker with JAX_PLATFORMS={present[0]}, or list it in the cluster of "
                "the chief, and start the training again."
            )


def _read_index(address: str, task: str) -> int:
    job, _, number = task.partition(":")
    if job != "worker" or not number.isdecimal():
        raise ClusterError(
            f"The task at {address} is {task!r}.\n\nOnly a worker can join a training.\n\n"
            "Start it with `jaxdist server --type worker --index N`, and pass its address."
        )
    return int(number)


def _check_same(link: RemoteWorkerLink, address: str) -> None:
    if link.address != address:
        raise ClusterError(
            f"The worker at {address} has the index {link.index}, and so does the worker at "
            f"{link.address}, which takes part already.\n\n"
            "Each worker of a training has an index of its own.\n\n"
            f"Start it with another one, such as `jaxdist server --type worker --index "
            f"{link.index + 1} --announce`; its TF_CONFIG lists its address under this index."
        )
