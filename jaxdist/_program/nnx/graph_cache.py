"""A cache of the NNX objects that a function was last called with, with their variables."""

from collections.abc import Sequence
from typing import Any

from jaxdist._program.arguments.arguments import Flat
from jaxdist._program.nnx.graph import CachedGraph

# Each entry keeps a model's variables alive, so only the last few models are cached.
MAX_KEPT_GRAPHS = 8


class GraphCache:
    """Finds the `CachedGraph` of a call by the identity of its NNX objects."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], CachedGraph] = {}

    def of(self, flat: Flat) -> CachedGraph | None:
        """Return the `CachedGraph` of a call's NNX objects; build a new one if it is outdated."""
        if not flat.nodes:
            return None
        kept = self.current(flat.nodes)
        if kept is None:
            key, held = tuple(map(id, flat.nodes)), self._kept
            kept = CachedGraph(tuple(flat.nodes), flat.node_names(), lambda _: held.pop(key, None))
            if len(held) >= MAX_KEPT_GRAPHS:
                held.pop(next(iter(held)))
            held[key] = kept
        return kept

    def current(self, nodes: Sequence[Any]) -> CachedGraph | None:
        """Return the `CachedGraph` of these NNX objects, or None if there is no current one."""
        kept = self._kept.get(tuple(map(id, nodes)))
        return kept if kept is not None and kept.is_current() else None
