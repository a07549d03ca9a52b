"""Which closures a server has counted, so that a closure that runs twice counts once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

COUNTED, ALREADY, FINISHED = "counted", "already counted", "finished"


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
        known = self._clients.get(client)
        if known is None:
            return None
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
