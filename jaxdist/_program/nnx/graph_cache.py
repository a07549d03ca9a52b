"""The NNX objects that a function was called on last, each with its kept list of variables."""

from collections.abc import Sequence
from typing import Any

from jaxdist._program.arguments.arguments import Flat
from jaxdist._program.nnx.graph import CachedGraph

# Kept lists hold the variables, so only those of the last few models are kept.
MAX_KEPT_GRAPHS = 8


class GraphCache:
    """Finds the `CachedGraph` of a call, by the identity of its NNX objects."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], CachedGraph] = {}

    def of(self, flat: Flat) -> CachedGraph | None:
        """The kept list of the NNX objects of a call, made anew where it is out of date."""
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
        """The kept list of these NNX objects, if it is still right."""
        kept = self._kept.get(tuple(map(id, nodes)))
        return kept if kept is not None and kept.is_current() else None
