"""`KeptValues`: the values of variables that a worker keeps between closures."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxdist._parameter_server.protocol import Values
from jaxdist._parameter_server.worker.devices import PutOn


@dataclasses.dataclass
class _Kept:
    place: int
    incarnation: str
    version: int
    value: Any
    fence: int
    since: float


class KeptValues:
    """The values of variables that a worker keeps, on its devices.

    Args:
        put: Puts arrays on the devices.
    """

    def __init__(self, put: PutOn) -> None:
        self._put = put
        self._kept: dict[str, _Kept] = {}

    def forget(self) -> None:
        """Forget all of them."""
        self._kept.clear()

    def is_fresh(self, name: str, fence: int, since: float) -> bool:
        """Whether a value is there that came after the fence, and not before a time."""
        kept = self._kept.get(name)
        return kept is not None and kept.fence >= fence and kept.since >= since

    def get(self, name: str) -> Any:
        """Return the value of a variable that exists."""
        return self._kept[name].value

    def find_version(self, name: str) -> int | None:
        """Return the version of a value; None if it is not there."""
        kept = self._kept.get(name)
        return None if kept is None else kept.version

    def get_incarnation(self, name: str) -> str:
        """Return the incarnation of the server to which the version of a value belongs."""
        return self._kept[name].incarnation

    def describe(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the versions that a server needs not send again, as fields of `Read`."""
        kept = {n: self._kept[n] for n in names if n in self._kept}
        if not kept:
            return {}
        known = {name: k.version for name, k in kept.items()}
        return {"known": known, "incarnation": next(iter(kept.values())).incarnation}

    def keep(self, place: int, found: Values, fence: int) -> None:
        """Keep what a server has sent, and note that the other values are still those it has."""
        now = time.monotonic()
        # The kept values of a server have one incarnation: the versions of another one would be
        # those of other values.
        for name, kept in list(self._kept.items()):
            if kept.place == place and kept.incarnation != found.incarnation:
                del self._kept[name]
        # All at once: each call of `device_put` costs tens of microseconds.
        arrays = self._put.as_inputs(list(found.values.values()))
        values = dict(zip(found.values, arrays, strict=True))
        for name, version in found.versions.items():
            if name in values:
                value, incarnation = values[name], found.incarnation
                self._kept[name] = _Kept(place, incarnation, version, value, fence, now)
            else:
                kept = self._kept[name]
                kept.fence, kept.since = fence, now
