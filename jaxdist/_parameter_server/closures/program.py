"""`ClosureProgram`: a function, traced once for each shape of its arguments and batches."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._parameter_server.closures.adopted import are_current, find_moved, list_constants
from jaxdist._parameter_server.closures.inputs import StateLeaf
from jaxdist._parameter_server.closures.traced import Traced
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._program import WholeCall
from jaxdist._typing import PyTree
from jaxdist._values import BatchSource, current_binding
from jaxdist.errors import ContextError

# Traces a call; the optimizers of the closure move to the servers.
Trace = Callable[[WholeCall, Sequence[StateLeaf]], Traced]


class TemplateSource(BatchSource):
    """An iterator that stands for those of the workers while a function is traced.

    Args:
        template: A pytree of arrays with the shapes of one batch.
    """

    def __init__(self, template: PyTree) -> None:
        self._templates = [template]
        self._taken = 0

    def take(self) -> PyTree:
        """Return the next template; the last one stands for all later batches."""
        number, self._taken = self._taken, self._taken + 1
        return self._templates[min(number, len(self._templates) - 1)]

    def __iter__(self) -> "TemplateSource":
        return self

    def __next__(self) -> PyTree:
        binding = current_binding()
        if binding is None:
            raise ContextError(
                "next was called on the iterator of a per-worker dataset after the function that "
                "got it had ended.\n\n"
                "Its batches are on the workers.\n\n"
                "Call next in the function that is given to ClusterCoordinator.schedule."
            )
        return binding.next_batch(self)

    def get_next(self) -> PyTree:
        """Return the next batch, as `next` does."""
        return next(self)

    def position(self) -> int:
        """Return how many were taken."""
        return self._taken

    def put_back(self, taken: Sequence[tuple[PyTree, Any]], before: Any) -> None:
        """Begin again from a position."""
        self._taken = before

    def use(self, templates: Sequence[PyTree]) -> None:
        """Use other templates from the start."""
        self._templates, self._taken = list(templates), 0


class ClosureProgram:
    """A function with arguments of one shape.

    Args:
        call: A call of the function; later calls of the same key use its program.
        state: The variables of its NNX objects.
        sources: Its iterators.
        trace: Traces the call; its draws give the templates of batches.

    Attributes:
        first: The closure for the shapes of the first trace.
        first_batches: The templates of its batches, by iterator.
    """

    def __init__(
        self,
        call: WholeCall,
        state: Sequence[StateLeaf],
        sources: Sequence[TemplateSource],
        trace: Trace,
    ) -> None:
        self._call, self._state = call, list(state)
        self._sources, self._trace_call = list(sources), trace
        self._lock = threading.Lock()
        self._known: dict[Any, Traced] = {}
        self.first = self._trace()
        self.first_batches = [list(own) for own in self._call.draws.batches]
        graph = call.graph
        self._variables = [] if graph is None else list(graph.variables)
        # NNX variables that the function uses, and that are not among its arguments.
        self.captured = find_moved(call.fn)
        self._constants = list_constants(call.fn)
        self._known[self._key(None)] = self.first

    def is_current(self) -> bool:
        """Whether the constants that the function captures are still those of its first trace."""
        return are_current(self._constants)

    def find_keys(self) -> list[np.ndarray]:
        """Return the random keys of the NNX objects, as data; they come after the arguments."""
        return [
            np.asarray(jax.random.key_data(variable.get_raw_value()))
            for variable, leaf in zip(self._variables, self._state, strict=True)
            if leaf.key is not None
        ]

    def find(self, batches: Sequence[Sequence[PyTree]]) -> Traced:
        """Return the closure for these batches, by iterator; trace it if the shapes are new."""
        key = self._key(batches)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                for source, own in zip(self._sources, batches, strict=True):
                    source.use([jax.tree.map(_make_template, batch) for batch in own])
                found = self._known[key] = self._trace()
            return found

    def _key(self, batches: Sequence[Sequence[PyTree]] | None) -> Any:
        given = self._call.draws.batches if batches is None else batches
        leaves, treedef = jax.tree.flatten([list(own) for own in given])
        shapes = tuple((np.shape(x), np.dtype(x.dtype)) for x in leaves)
        return treedef, shapes, find_shardings(leaves)

    def _trace(self) -> Traced:
        self._call.draws.put_back()
        return self._trace_call(self._call, self._state)


def find_shardings(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return how arrays lie on several devices, which decides on the program that takes them."""
    return tuple(
        (n, x.sharding)
        for n, x in enumerate(leaves)
        if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    )


def _make_template(leaf: Any) -> Any:
    """Return an array of the shape of a leaf, and on its devices if it is on several."""
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return leaf
    return make_zero(np.shape(leaf), leaf.dtype)
