"""`Places`: where the tasks of a job are, as the launcher knows it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any


class Places:
    """The address that each task has in TF_CONFIG, and where it is now.

    The first one is what tasks call each other by. The second one is told to them when it changes;
    see Note [Addresses that change].

    Args:
        addresses: The addresses in TF_CONFIG, by the names of the tasks.
        actors: Of all tasks; they are told.
    """

    def __init__(self, addresses: Mapping[str, str], actors: Sequence[Any]) -> None:
        self._names, self._actors = dict(addresses), list(actors)
        self._now = dict(addresses)
        self._taken = set(addresses.values())
        self._version = 1
        self._lock = threading.Lock()

    def find(self, task: str) -> str:
        """Return where a task is."""
        with self._lock:
            return self._now[task]

    def list_taken(self) -> list[str]:
        """Return all addresses that a task has had."""
        with self._lock:
            return sorted(self._taken)

    def describe(self) -> tuple[int, dict[str, str]]:
        """Return the number of changes, and each present address by that in TF_CONFIG."""
        with self._lock:
            return self._version, self._map()

    def move(self, task: str, address: str) -> None:
        """Note where a task is, and tell the others if that is somewhere else than before."""
        with self._lock:
            if self._now[task] == address:
                return
            self._now[task] = address
            self._taken.add(address)
            self._version += 1
            version, addresses = self._version, self._map()
        for actor in self._actors:
            # One that is just being started again gets them with its process.
            actor.learn.remote(version, addresses)

    def _map(self) -> dict[str, str]:
        return {name: self._now[task] for task, name in self._names.items()}
