"""`State`: everything that one server holds, and that its snapshots keep."""

import collections
import dataclasses
import secrets
from typing import Any

from jaxdist._parameter_server.protocol import ServerStatistics, VariableStatistics
from jaxdist._parameter_server.server.counted import CountedClosures
from jaxdist._parameter_server.server.programs import UpdateProgram
from jaxdist._parameter_server.server.stored import StoredVariable


@dataclasses.dataclass(frozen=True)
class Restore:
    """A start from a snapshot.

    Args:
        incarnation: The incarnation that began with it.
        counted: The closures that the snapshot had counted, as `CountedClosures.to_json` does.
    """

    incarnation: str
    counted: dict[str, Any]


Slots = dict[tuple[str, str], tuple[str, ...]]  # of a variable and a program: names of variables


@dataclasses.dataclass
class State:
    """The variables of a server, and what it knows of them. The server's lock protects it."""

    variables: dict[str, StoredVariable] = dataclasses.field(default_factory=dict)
    programs: dict[str, UpdateProgram] = dataclasses.field(default_factory=dict)
    slots: Slots = dataclasses.field(default_factory=dict)
    counted: CountedClosures = dataclasses.field(default_factory=CountedClosures)
    mutations: int = 0  # of this incarnation, to see whether a snapshot would be another one
    applied: int = 0  # requests, over all incarnations
    already_counted: int = 0  # requests that came again
    staleness: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    # The same for each client: servers go on when the run of one has ended.
    staleness_of: dict[str, collections.Counter[int]] = dataclasses.field(default_factory=dict)
    # Versions are those of one incarnation: after a restart from a snapshot the same number may
    # name another value.
    incarnation: str = dataclasses.field(default_factory=lambda: make_incarnation())
    # What each restart has found in its snapshot, the oldest first.
    restores: list[Restore] = dataclasses.field(default_factory=list)
    max_staleness: int | None = None

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
