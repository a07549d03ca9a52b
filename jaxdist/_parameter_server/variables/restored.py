"""Variables that servers have restored from snapshots of earlier runs, and new ones."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxdist.errors import CheckpointError

_LOG = logging.getLogger("jaxdist")
_MOST = 5
_REMEDY = (
    "Give the variables the names that they had in the run that wrote the snapshots, and make them "
    "in the same order, since that decides on their servers. For a new training start the servers "
    "with another snapshot directory, or delete this one."
)


class _Server(Protocol):
    def hello(self, client: str = "") -> Mapping[str, Any]: ...


def compare_with_snapshots(
    servers: Sequence[_Server],
    client: str,
    made: Mapping[str, int],
    new: Mapping[str, int],
) -> None:
    """Say which variables begin anew although the servers have started from snapshots.

    Args:
        servers: The servers.
        client: The id of this run. What it has made itself before a server came back counts not.
        made: All variables of this run, with the number of their server.
        new: Those of them that were not compared yet.

    Raises:
        CheckpointError: No variable is in the snapshots.
    """
    restored = {
        (name, place)
        for place, server in enumerate(servers)
        for name in server.hello(client)["restored"]
    }
    missing = [(n, place) for n, place in new.items() if (n, place) not in restored]
    if not restored or not missing:
        return
    unused = sorted(restored - set(made.items()))
    if restored.isdisjoint(made.items()):
        raise CheckpointError(
            f"The variables {_list(missing)} were made on servers that have started from snapshots "
            f"of other variables: {_list(unused)}.\n\n"
            "A variable goes on from its value in the snapshot of its server, by its name. None of "
            f"these is there, so the training would begin anew.\n\n{_REMEDY}"
        )
    rest = (
        f" The snapshots also have {_list(unused)}, which nobody has asked for." if unused else ""
    )
    _LOG.warning(
        "The servers have started from snapshots, and these do not have %s: what is not there "
        "begins with its initial value.%s %s",
        _list(missing),
        rest,
        _REMEDY,
    )


def _list(variables: Sequence[tuple[str, int]]) -> str:
    """Return names for a message, with their servers."""
    names = [f"{name!r} on ps:{place}" for name, place in variables[:_MOST]]
    more = len(variables) - _MOST
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
