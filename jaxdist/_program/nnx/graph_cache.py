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
        self._graphs: dict[tuple[int, ...], CachedGraph] = {}

    def of(self, flat: Flat) -> CachedGraph | None:
        """Return the `CachedGraph` of a call's NNX objects; build a new one if it is outdated."""
        if not flat.nodes:
            return None
        cached_graph = self.current(flat.nodes)
        if cached_graph is None:
            key, held = tuple(map(id, flat.nodes)), self._graphs
            cached_graph = CachedGraph(
                tuple(flat.nodes), flat.node_names(), lambda _: held.pop(key, None)
            )
            if len(held) >= MAX_KEPT_GRAPHS:
                held.pop(next(iter(held)))
            held[key] = cached_graph
        return cached_graph

    def current(self, nodes: Sequence[Any]) -> CachedGraph | None:
        """Return the `CachedGraph` of these NNX objects, or None if there is no current one."""
        cached_graph = self._graphs.get(tuple(map(id, nodes)))
        return cached_graph if cached_graph is not None and cached_graph.is_current() else None
