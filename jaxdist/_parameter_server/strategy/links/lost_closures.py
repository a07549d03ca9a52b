"""`AcknowledgedClosures`: which closures a server has counted and then lost.

Note [Lost closures]
A worker tells with its results which servers have counted the closure, and in which incarnation. A
server that was started again tells what each of its restarts has found in its snapshot: the number
below which all closures were finished, and the later ones that were counted. A closure is lost if
an incarnation has counted it, and a restart after it did not find it. An incarnation tells how many
restarts were before it, so that the order is known also where its own snapshots are gone; and which
was the first, since a server without a snapshot begins with nothing.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from jaxdist._parameter_server.protocol import Restored, ServerInfo


class AcknowledgedClosures:
    """The closures that each incarnation of each server has counted, one bit for each."""

    def __init__(self) -> None:
        self._bits: dict[tuple[int, str], bytearray] = {}
        self._lock = threading.Lock()

    def note(self, number: int, counted: Mapping[int, str]) -> None:
        """Note that servers have counted a closure, by the number and incarnation of each."""
        byte, bit = divmod(number, 8)
        with self._lock:
            for key in counted.items():
                bits = self._bits.setdefault(key, bytearray())
                if byte >= len(bits):
                    bits.extend(bytes(max(byte + 1 - len(bits), len(bits))))
                bits[byte] |= 1 << bit

    def find_lost(self, hellos: Mapping[int, ServerInfo]) -> set[int]:
        """Return the closures of which a server has lost the changes.

        Args:
            hellos: What each server says of itself now, by its number.
        """
        lost: set[int] = set()
        with self._lock:
            for (place, incarnation), bits in self._bits.items():
                said = hellos[place]
                if said.incarnation == incarnation:
                    continue
                numbers = set(
                    np.flatnonzero(
                        np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
                    ).tolist()
                )
                first, _, _ = incarnation.split("-")
                if not said.incarnation.startswith(f"{first}-"):
                    # It came back with nothing.
                    lost |= numbers
                    continue
                restores = _find_later(incarnation, said.restores)
                for restore in restores:
                    counted, below = set(restore.counted), restore.below
                    lost |= {n for n in numbers if n >= below and n not in counted}
        return lost


def _find_later(incarnation: str, restores: Sequence[Restored]) -> Sequence[Restored]:
    """Return the restarts that came after an incarnation."""
    for n, restore in enumerate(restores):
        if restore.incarnation == incarnation:
            return restores[n + 1 :]
    later = [r for r in restores if _get_generation(r.incarnation) >= _get_generation(incarnation)]
    return later or restores[-1:]


def _get_generation(incarnation: str) -> int:
    return int(incarnation.split("-")[1])
