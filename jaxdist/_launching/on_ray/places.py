"""`Places`: the launcher's record of where the tasks of a job are."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any


class Places:
    """The address of each task in TF_CONFIG, and its current address.

    Tasks name each other by the address in TF_CONFIG. When a current address changes, all tasks get
    it; see Note [Addresses that change].

    Args:
        addresses: The addresses in TF_CONFIG, by the names of the tasks.
        actors: The actors of all tasks, which get the changes.
    """

    def __init__(self, addresses: Mapping[str, str], actors: Sequence[Any]) -> None:
        self._names, self._actors = dict(addresses), list(actors)
        self._now = dict(addresses)
        self._taken = set(addresses.values())
        self._version = 1
        self._lock = threading.Lock()

    def find(self, task: str) -> str:
        """Return the current address of a task."""
        with self._lock:
            return self._now[task]

    def list_taken(self) -> list[str]:
        """Return all addresses that a task has had."""
        with self._lock:
            return sorted(self._taken)

    def describe(self) -> tuple[int, dict[str, str]]:
        """Return the version, and each current address by the address in TF_CONFIG."""
        with self._lock:
            return self._version, self._map()

    def move(self, task: str, address: str) -> None:
        """Set the address of a task, and send it to all tasks if it has changed."""
        with self._lock:
            if self._now[task] == address:
                return
            self._now[task] = address
            self._taken.add(address)
            self._version += 1
            version, addresses = self._version, self._map()
        for actor in self._actors:
            # An actor that is being restarted gets them when its process starts.
            actor.learn.remote(version, addresses)

    def _map(self) -> dict[str, str]:
        return {name: self._now[task] for task, name in self._names.items()}
