"""`Servers`: the parameter servers of a job, as one of its other tasks uses them."""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from jaxdist import _compat
from jaxdist._parameter_server.server import Change, Changed, Creation, UpdateRegistration, Values
from jaxdist._parameter_server.variables.fence import Fence
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.variables.restored import compare_with_snapshots

_LOG = logging.getLogger("jaxdist")
# The variable on whose server new ones are created; "" for the next server.
_PLACED_WITH: ContextVar[str] = ContextVar("jaxdist_placed_with", default="")


class ServerLink(Protocol):
    """One server: the methods of `VariableServer` that another task calls."""

    @property
    def incarnation(self) -> str:
        """The start of the server, as its last reply says; "" before the first."""
        ...

    def hello(self, client: str = "") -> Mapping[str, Any]:
        """Return who the server is, and what it has counted of a client's closures."""
        ...

    def snapshot(self) -> Any:
        """Write a snapshot."""
        ...

    def create(
        self, creations: Sequence[Creation], client: str = ""
    ) -> Mapping[str, tuple[bool, int]]:
        """Create variables."""
        ...

    def register_update(
        self, registration: UpdateRegistration, client: str = ""
    ) -> Mapping[str, tuple[bool, int]]:
        """Add an update program."""
        ...

    def read(
        self,
        names: Sequence[str],
        *,
        client: str = "",
        closure: int | None = None,
        register: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
        incarnation: str | None = None,
    ) -> Values:
        """Return values."""
        ...

    def read_rows(self, name: str, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Return rows."""
        ...

    def change(
        self,
        changes: Sequence[Change],
        *,
        client: str = "",
        closure: int | None = None,
        done_below: int = 0,
        incarnation: str | None = None,
        read: Sequence[str] = (),
        known: Mapping[str, int] | None = None,
    ) -> Changed:
        """Apply changes."""
        ...

    def release(self, client: str, closure: int) -> bool:
        """Remove the reads of a closure."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Return counts."""
        ...


class Servers:
    """The servers of a job, and which variable is on which of them.

    Variables are placed in turn: the first on server 0, the next on server 1, and so on.

    Args:
        links: The servers, in the order of their tasks.
        client: The id of the job's run, with which closures are counted.
    """

    def __init__(self, links: Sequence[ServerLink], client: str) -> None:
        self.links, self.client = list(links), client
        self._place: dict[str, int] = {}
        self._next = 0
        self._has_said_what_counts = False
        self._lock = threading.Lock()
        # What was made on each server, and is in no snapshot yet.
        self._unsaved: dict[int, list[Creation | UpdateRegistration]] = {}
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
        made = Creation(name, value)
        try:
            self._before_creation(place, [name])
            is_new, version = self.links[place].create([made], self.client)[name]
        except BaseException:
            with self._lock:
                del self._place[name]
                self._next -= step
            raise
        if not is_new:
            self._say_what_counts(name, place, version)
        self._note_made(place, made)
        return name

    def _say_what_counts(self, name: str, place: int, version: int) -> None:
        """Warn that a value of another run counts; once, since a model has many variables."""
        if self._has_said_what_counts:
            return
        self._has_said_what_counts = True
        _LOG.warning(
            "Variable %r exists on ps:%d, where another run has made it and changed it %d time(s): "
            "that value counts, and initial_value does not. The same is true for other variables "
            "that exist there. For a new start, start the servers again without their snapshots, "
            "or assign the values.",
            name,
            place,
            version,
        )

    def place_with(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Create variables in a block on the server that has this one."""
        return _compat.set_in_block(_PLACED_WITH, name)

    def register(self, place: int, registration: UpdateRegistration) -> list[str]:
        """Add an update program to a server; return the names of the new slots."""
        self._before_creation(place, _list_slots(registration))
        made = self.links[place].register_update(registration, self.client)
        self._note_made(place, registration)
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
                `compare_with_snapshots`.
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
        compare_with_snapshots(self.links, self.client, made, new)
        with self._lock:
            for name in new:
                self._uncompared.pop(name, None)

    def _save(self, place: int, made: Sequence[Creation | UpdateRegistration]) -> None:
        """Let a server write a snapshot that has all of these."""
        link = self.links[place]
        while (found := link.hello())["has_snapshots"]:
            # It may have been started again since, from a snapshot that has not all of them.
            for one in made:
                names = [one.name] if isinstance(one, Creation) else _list_slots(one)
                if names and set(names) <= set(found["versions"]):
                    continue
                self._before_creation(place, names)
                if isinstance(one, Creation):
                    link.create([one], self.client)
                else:
                    link.register_update(one, self.client)
            link.snapshot()
            if link.hello()["incarnation"] == found["incarnation"]:
                return

    def _note_made(self, place: int, made: Creation | UpdateRegistration) -> None:
        with self._lock:
            self._unsaved.setdefault(place, []).append(made)
            names = [made.name] if isinstance(made, Creation) else _list_slots(made)
            self._uncompared.update(dict.fromkeys(names, place))

    def read(self, name: str) -> np.ndarray:
        """Return the value of a variable."""
        self.fence.advance()
        return self.links[self.find_server(name)].read([name]).values[name]

    def read_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows of a variable."""
        self.fence.advance()
        return self.links[self.find_server(name)].read_rows(name, ids)[0]

    def read_rows_of_closure(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return rows that a closure reads, which this task does not see."""
        return self.links[self.find_server(name)].read_rows(name, ids)[0]

    def change(self, change: Change) -> None:
        """Apply one change that belongs to no closure."""
        self.links[self.find_server(change.name)].change([change])
        self.fence.advance()

    def call_each(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """Call functions of server links at the same time; return their results by server."""
        if len(calls) == 1:
            return {n: call(self.links[n]) for n, call in calls.items()}
        if not hasattr(self._own, "threads"):
            self._own.threads = ThreadPoolExecutor(len(self.links), "jaxdist-servers")
        threads: ThreadPoolExecutor = self._own.threads
        waiting = {n: threads.submit(call, self.links[n]) for n, call in calls.items()}
        # Every call ends before an error is raised: none goes on behind the caller's back.
        errors = [e for f in waiting.values() if (e := f.exception()) is not None]
        if errors:
            raise errors[0]
        return {n: f.result() for n, f in waiting.items()}

    def close(self) -> None:
        """Close the connections. The threads end with the threads that have made them."""
        for link in self.links:
            if isinstance(link, RemoteServer):
                link.close()


def _list_slots(given: UpdateRegistration) -> list[str]:
    """Return the names of the slots of an update program."""
    slots = range(given.num_slots)
    return [f"{name}/{given.prefix}_{n}" for name in given.variables for n in slots]
