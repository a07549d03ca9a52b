"""`ClosureProgram`: a function, traced once for each shape of its arguments and batches."""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._parameter_server.closures.captured import adopt_captured, find_moved
from jaxdist._parameter_server.closures.recorder import Recorders
from jaxdist._parameter_server.closures.trace import StateLeaf, trace_closure
from jaxdist._parameter_server.closures.traced import TracedClosure
from jaxdist._parameter_server.variables.ports import make_zero
from jaxdist._parameter_server.variables.server_variable import ServerVariable
from jaxdist._program import WholeCall
from jaxdist._typing import PyTree
from jaxdist._values import BatchSource, current_binding
from jaxdist.errors import ContextError, UnsupportedError

# Finishes a trace: the optimizers of the closure move to the servers.
Finish = Callable[[TracedClosure, Recorders, Sequence[Any]], TracedClosure]


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
        layout: The replicas of one worker.
        sources: Its iterators.
        enter: Returns the context in which the function is traced; it gives the strategy.
        finish: Finishes a trace.
    """

    def __init__(
        self,
        call: WholeCall,
        state: Sequence[StateLeaf],
        layout: Any,
        sources: Sequence[TemplateSource],
        enter: Callable[[], Any],
        finish: Finish,
    ) -> None:
        self._call, self._state, self._layout = call, list(state), layout
        self._sources, self._enter, self._finish = list(sources), enter, finish
        # The random keys of the NNX objects, as data; they come after the arguments.
        held = [leaf.key for leaf in state if leaf.key is not None]
        self.keys = [np.asarray(jax.random.key_data(key)) for key in held]
        self._lock = threading.Lock()
        self._known: dict[Any, TracedClosure] = {}
        self.first = self._trace()
        graph = call.graph
        self._variables = [] if graph is None else list(graph.variables)
        self._raw = [v.get_raw_value() for v in self._variables]
        self._captured = find_moved(call.fn)
        self._known[self._key(None)] = self.first

    def put_back(self) -> None:
        """Send values that were set on NNX objects since the last call to the servers.

        Raises:
            UnsupportedError: The state of an optimizer was set.
        """
        for variable, on_server in self._captured:
            if variable.get_raw_value() is not on_server:
                on_server.assign(np.asarray(variable.get_raw_value()))
                variable.set_raw_value(on_server)
        raw = [v.get_raw_value() for v in self._variables]
        if all(map(operator.is_, raw, self._raw)):
            return
        for number, (leaf, new, old) in enumerate(zip(self._state, raw, self._raw, strict=True)):
            if new is old:
                continue
            if leaf.variable is not None:
                leaf.variable.assign(np.asarray(new))
                self._variables[number].set_raw_value(leaf.variable)
            elif isinstance(old, ServerVariable):
                raise UnsupportedError(
                    f"{leaf.name}, which is the state of an optimizer on the servers, was set.\n\n"
                    "Each server holds its part of the state beside the parameters.\n\n"
                    "Make a new nnx.Optimizer, set its state, and schedule with it."
                )
            elif leaf.key is not None:
                own = [n for n, other in enumerate(self._state) if other.key is not None]
                self.keys[own.index(number)] = np.asarray(jax.random.key_data(new))
                self._raw[number] = new
            else:
                self._raw[number] = new

    def find(self, batches: Sequence[Sequence[PyTree]]) -> TracedClosure:
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
        return treedef, tuple((np.shape(x), np.dtype(x.dtype)) for x in leaves)

    def _trace(self) -> TracedClosure:
        self._call.draws.put_back()
        with self._enter() as strategy:

            def move(closed: Any) -> bool:
                return adopt_captured(self._call.fn, closed, strategy)

            traced, recorders = trace_closure(self._call, self._state, self._layout, move)
            return self._finish(traced, recorders, self._call.flat.nodes)


def _make_template(leaf: Any) -> Any:
    """Return an array of the shape of a leaf, and on its devices if it is on several."""
    if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        return leaf
    return make_zero(np.shape(leaf), leaf.dtype)
