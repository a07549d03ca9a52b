"""`State`: everything that one server holds, and that its snapshots keep."""

import collections
import dataclasses
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from jaxdist._parameter_server.protocol import ServerStatistics, VariableStatistics
from jaxdist._parameter_server.server.programs import UpdateProgram
from jaxdist._parameter_server.server.stored import StoredVariable, find_variable

COUNTED, ALREADY, FINISHED = "counted", "already counted", "finished"
Slots = dict[tuple[str, str], tuple[str, ...]]  # of a variable and a program: names of variables


@dataclasses.dataclass
class _Client:
    below: int = 0  # every closure below this number is finished
    counted: set[int] = dataclasses.field(default_factory=set)


class CountedClosures:
    """The numbers of the closures that a server has counted, for each client."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}

    def find_status(self, client: str, closure: int) -> str | None:
        """Return why a change of this closure must not be applied; None if it may be.

        `FINISHED` is a closure below the watermark: its client does not wait for it any more, and
        whether it was counted is forgotten. A change of it that arrives so late is not applied.
        """
        known = self._clients.get(client, _Client())
        if closure < known.below:
            return FINISHED
        return ALREADY if closure in known.counted else None

    def count(self, client: str, closure: int) -> None:
        """Remember that a closure is counted."""
        self._clients.setdefault(client, _Client()).counted.add(closure)

    def forget_below(self, client: str, below: int) -> None:
        """Raise the watermark of a client: its closures below are finished."""
        known = self._clients.setdefault(client, _Client())
        # A message that was delayed brings an older watermark.
        if below > known.below:
            known.below = below
            known.counted = {n for n in known.counted if n >= below}

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON can hold them."""
        return {
            client: {"below": known.below, "counted": sorted(known.counted)}
            for client, known in self._clients.items()
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "CountedClosures":
        """Return the closures that `to_json` described."""
        made = cls()
        for client, known in stored.items():
            made._clients[client] = _Client(known["below"], set(known["counted"]))
        return made


@dataclasses.dataclass(frozen=True)
class Restore:
    """A start from a snapshot.

    Args:
        incarnation: The incarnation that began with it.
        counted: The closures that the snapshot had counted, as `CountedClosures.to_json` does.
    """

    incarnation: str
    counted: dict[str, Any]


@dataclasses.dataclass
class State:
    """The variables of a server, and what it knows of them. The server's lock protects it."""

    variables: dict[str, StoredVariable] = dataclasses.field(default_factory=dict)
    programs: dict[str, UpdateProgram] = dataclasses.field(default_factory=dict)
    slots: Slots = dataclasses.field(default_factory=dict)
    counted: CountedClosures = dataclasses.field(default_factory=CountedClosures)
    mutations: int = 0  # of this incarnation, to see whether a snapshot would be another one
    applied: int = 0  # requests, over all incarnations
    already_counted: int = 0  # requests that were repeated
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    # The same for each client: servers continue when the run of one has ended.
    staleness_of: dict[str, collections.Counter[int]] = dataclasses.field(default_factory=dict)
    # Versions are those of one incarnation: after a restart from a snapshot the same number may
    # name another value.
    incarnation: str = dataclasses.field(default_factory=lambda: make_incarnation())
    # What each restart found in its snapshot, the oldest first.
    restores: list[Restore] = dataclasses.field(default_factory=list)
    max_staleness: int | None = None

    def get_versions(self, names: Iterable[str]) -> dict[str, int]:
        """Return the version of each of these variables."""
        return {name: find_variable(self.variables, name).version for name in names}

    def describe(self, snapshots: dict[str, Any] | None) -> ServerStatistics:
        """Return counts, and the histogram of staleness; others may change the state meanwhile."""
        return ServerStatistics(
            incarnation=self.incarnation,
            applied=self.applied,
            already_counted=self.already_counted,
            staleness=dict(sorted(self.staleness.items())),
            staleness_of={n: dict(sorted(own.items())) for n, own in self.staleness_of.items()},
            variables={
                name: VariableStatistics(
                    v.version, v.applied, v.nbytes, dict(sorted(v.staleness.items()))
                )
                for name, v in self.variables.items()
            },
            snapshots=snapshots,
        )


def make_incarnation(before: str | None = None) -> str:
    """Return a new incarnation: the id of the first one, the number of restarts, and its own id.

    Args:
        before: The incarnation that wrote the snapshot; None for a server that begins with nothing.
    """
    own = secrets.token_hex(8)
    if before is None:
        return f"{own}-0-{own}"
    first, generation, _ = before.split("-")
    return f"{first}-{int(generation) + 1}-{own}"
