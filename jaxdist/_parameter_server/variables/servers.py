"""`Servers`: the parameter servers of a job, as one of its other tasks uses them.

Note [Fence]
A worker keeps the values of variables that came with the reply to its last changes. They may be
old, because other workers change variables too. Nobody can tell as long as nobody knows of a newer
value. So each closure carries the fence, and the fence increases whenever the program of the
coordinator learns something: at join, done, fetch, and at its own reads and changes of variables.
A worker that kept values from before the fence of a closure reads again.

The fence is read when a closure begins to run, not when it is scheduled: what was learned between
the two counts as well.
"""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import msgspec
import numpy as np

from jaxdist import _compat
from jaxdist._parameter_server.protocol import (
    Change,
    ChangeVariables,
    Create,
    Creation,
    Hello,
    Read,
    ReadRows,
    RegisterUpdate,
    WriteSnapshot,
    as_array,
)
from jaxdist._parameter_server.transport.requests import R, Request
from jaxdist._parameter_server.variables.remote_server import Link, RemoteServer
from jaxdist.errors import CheckpointError

_LOG = logging.getLogger("jaxdist")
_MOST_NAMES = 5
_REMEDY = (
    "Give the variables the names that they had in the run that wrote the snapshots, and make them "
    "in the same order, since that decides on their servers. For a new training start the servers "
    "with another snapshot directory, or delete this one."
)
# The variable on whose server new ones are created; "" for the next server.
_PLACED_WITH: ContextVar[str] = ContextVar("jaxdist_placed_with", default="")


class Fence:
    """A number that only increases. All threads may use it.

    Example:
        >>> from jaxdist._parameter_server.variables.servers import Fence
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


class Servers:
    """The servers of a job, and which variable is on which of them.

    Variables are placed in turn: the first on server 0, the next on server 1, and so on.

    Args:
        links: The servers, in the order of their tasks.
        client: The id of the job's run, with which closures are counted.
    """

    def __init__(self, links: Sequence[Link], client: str) -> None:
        self.links, self.client = list(links), client
        self._place: dict[str, int] = {}
        self._next = 0
        self._has_said_what_counts = False
        self._lock = threading.Lock()
        # What was made on each server, and is in no snapshot yet.
        self._unsaved: dict[int, list[Create | RegisterUpdate]] = {}
        # What was made, and is not compared yet with the snapshots of earlier runs.
        self._uncompared: dict[str, int] = {}
        # Workers must see what this task has read or changed; see Note [Fence].
        self.fence = Fence()
        # Each worker of this process has its own threads: with `max_staleness` the calls of one
        # wait for those of others, which must not wait for a thread.
        self._own = threading.local()

    def find_server(self, name: str) -> int:
        """Return the number of the server that has a variable."""
        return self._place[name]

    def group(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Return names by the number of their server, in the order of the servers."""
        groups: dict[int, list[str]] = {}
        for name in dict.fromkeys(names):
            groups.setdefault(self.find_server(name), []).append(name)
        return dict(sorted(groups.items()))

    def create(self, label: str, value: np.ndarray | bytes) -> str:
        """Create a variable on the next server; return its name, which no other variable has.

        Args:
            label: The name, if no variable has it.
            value: The value, or the bytes of an exported function that makes it on the server.
        """
        with self._lock:
            name, number = label, 0
            while name in self._place:
                number += 1
                name = f"{label}_{number}"
            beside = _PLACED_WITH.get()
            # The server of the next variable is the same with and without one that is placed so.
            step = 0 if beside in self._place else 1
            place = self._next % len(self.links) if step else self._place[beside]
            self._place[name] = place
            self._next += step
        is_program = isinstance(value, bytes)
        made = Creation(name, program=as_array(value)) if is_program else Creation(name, value)
        request = Create([made], self.client)
        try:
            self._before_creation(place, [name])
            is_new, version = self.links[place].call(request).made[name]
        except BaseException:
            with self._lock:
                del self._place[name]
                self._next -= step
            raise
        if not is_new:
            self._say_what_counts(name, place, version)
        self._note_made(place, request)
        return name

    def _say_what_counts(self, name: str, place: int, version: int) -> None:
        """Warn that a value of another run counts; once, since a model has many variables."""
        if self._has_said_what_counts:
            return
        self._has_said_what_counts = True
        _LOG.warning(
            "Variable %r exists on ps:%d, where another run has made it and changed it %d time(s): "
            "that value is used, and initial_value is not. The same is true for other variables "
            "that exist there. For a new start, start the servers again without their snapshots, "
            "or assign the values.",
            name,
            place,
            version,
        )

    def place_with(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Create variables in a block on the server that has this one."""
        return _compat.set_in_block(_PLACED_WITH, name)

    def register(self, place: int, request: RegisterUpdate) -> list[str]:
        """Add an update program to a server; return the names of the new slots."""
        request = msgspec.structs.replace(request, client=self.client)
        self._before_creation(place, request.list_names())
        made = self.links[place].call(request).made
        self._note_made(place, request)
        with self._lock:
            self._place.update(dict.fromkeys(made, place))
        return list(made)

    def _before_creation(self, place: int, names: Sequence[str]) -> None:
        """Do what comes before variables are made on a server."""

    def learn(self, places: Mapping[str, int]) -> None:
        """Take over which variable is on which server, from the task that created them."""
        with self._lock:
            self._place.update(places)

    def save_new(self) -> None:
        """Let servers write a snapshot if they have variables that were created since the last.

        A server that is killed then has all variables when it comes back, and what is lost is
        changes only. Servers without a snapshot directory write none.

        Raises:
            CheckpointError: The servers have snapshots of other variables; see
                `_compare_with_snapshots`.
        """
        self._compare()
        while self._unsaved:
            with self._lock:
                place = next(iter(self._unsaved), None)
                if place is None:
                    return
                made = self._unsaved.pop(place)
            try:
                self._save(place, made)
            except BaseException:
                with self._lock:
                    self._unsaved[place] = made + self._unsaved.get(place, [])
                raise

    def _compare(self) -> None:
        """Compare what was made with the snapshots that the servers have started from."""
        if not self._uncompared:
            return
        with self._lock:
            made, new = dict(self._place), dict(self._uncompared)
        _compare_with_snapshots(self.links, self.client, made, new)
        with self._lock:
            for name in new:
                self._uncompared.pop(name, None)

    def _save(self, place: int, made: Sequence[Create | RegisterUpdate]) -> None:
        """Let a server write a snapshot that has all of these."""
        link = self.links[place]
        while (found := link.call(Hello())).has_snapshots:
            # It may have been started again since, from a snapshot that has not all of them.
            for one in made:
                names = one.list_names()
                if names and set(names) <= set(found.versions):
                    continue
                self._before_creation(place, names)
                link.call(one)
            link.call(WriteSnapshot())
            if link.call(Hello()).incarnation == found.incarnation:
                return

    def _note_made(self, place: int, made: Create | RegisterUpdate) -> None:
        with self._lock:
            self._unsaved.setdefault(place, []).append(made)
            self._uncompared.update(dict.fromkeys(made.list_names(), place))

    def read(self, name: str) -> np.ndarray:
        """Return the value of a variable."""
        self.fence.advance()
        return self.links[self.find_server(name)].call(Read([name])).values[name]

    def read_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows of a variable."""
        self.fence.advance()
        return self.read_rows_of_closure(name, ids)

    def read_rows_of_closure(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows that a closure reads, which this task does not see."""
        return self.links[self.find_server(name)].call(ReadRows(name, ids)).rows

    def change(self, change: Change) -> None:
        """Apply one change that belongs to no closure."""
        self.links[self.find_server(change.name)].call(ChangeVariables([change]))
        self.fence.advance()

    def call_each(self, requests: Mapping[int, Request[R]]) -> dict[int, R]:
        """Send requests to servers at the same time; return the replies by server."""
        if len(requests) == 1:
            return {n: self.links[n].call(request) for n, request in requests.items()}
        if not hasattr(self._own, "threads"):
            self._own.threads = ThreadPoolExecutor(len(self.links), "jaxdist-servers")
        threads: ThreadPoolExecutor = self._own.threads
        waiting = {n: threads.submit(self.links[n].call, r) for n, r in requests.items()}
        # Every call ends before an error is raised: no call continues after it.
        errors = [e for f in waiting.values() if (e := f.exception()) is not None]
        if errors:
            raise errors[0]
        return {n: f.result() for n, f in waiting.items()}

    def close(self) -> None:
        """Close the connections. The threads end with the threads that have made them."""
        for link in self.links:
            if isinstance(link, RemoteServer):
                link.close()


def _compare_with_snapshots(
    servers: Sequence[Link],
    client: str,
    made: Mapping[str, int],
    new: Mapping[str, int],
) -> None:
    """Report variables that start over although the servers have started from snapshots.

    Args:
        servers: The servers.
        client: The id of this run. What it made before a server came back does not count.
        made: All variables of this run, with the number of their server.
        new: Those of them that were not compared yet.

    Raises:
        CheckpointError: No variable is in the snapshots.
    """
    restored = {
        (name, place)
        for place, server in enumerate(servers)
        for name in server.call(Hello(client)).restored
    }
    missing = [(n, place) for n, place in new.items() if (n, place) not in restored]
    if not restored or not missing:
        return
    unused = sorted(restored - set(made.items()))
    if restored.isdisjoint(made.items()):
        raise CheckpointError(
            f"The variables {_list_places(missing)} were made on servers that have started from "
            f"snapshots of other variables: {_list_places(unused)}.\n\n"
            "A variable continues from its value in the snapshot of its server, by its name. None "
            f"of these is in a snapshot, so the training would start over.\n\n{_REMEDY}"
        )
    rest = (
        f" The snapshots also have {_list_places(unused)}, which were not created."
        if unused
        else ""
    )
    _LOG.warning(
        "The servers have started from snapshots, and these do not have %s: what is missing "
        "begins with its initial value.%s %s",
        _list_places(missing),
        rest,
        _REMEDY,
    )


def _list_places(variables: Sequence[tuple[str, int]]) -> str:
    """Return names for a message, with their servers."""
    names = [f"{name!r} on ps:{place}" for name, place in variables[:_MOST_NAMES]]
    more = len(variables) - _MOST_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
