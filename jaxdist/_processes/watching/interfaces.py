"""What watching needs of a store and of settings."""

from collections.abc import Mapping
from typing import Protocol


class Board(Protocol):
    """The part of `Store` through which processes see each other's state.

    A method may raise any exception when the service of the job cannot be reached.
    """

    def set(self, key: str, text: str, overwrite: bool = False) -> None:
        """Write a text."""

    def get(self, key: str) -> str | None:
        """Return a text, or None if the key has none."""

    def list(self, prefix: str) -> Mapping[str, str]:
        """Return all texts whose key starts with `prefix`, by key."""
        ...

    def delete(self, key: str) -> None:
        """Remove a text, if the key has one."""


class Patience(Protocol):
    """The part of `Settings` that says how long processes wait for each other."""

    @property
    def quiet_seconds(self) -> float:
        """Seconds in one collective after which each process logs a report."""
        ...

    @property
    def abort_seconds(self) -> float | None:
        """Seconds in one collective after which a process ends itself; None for never."""
        ...
