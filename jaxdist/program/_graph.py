"""Flax NNX objects as arguments: their variables go in as leaves and come back in place."""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import PyTreeDef

from jaxdist import _compat
from jaxdist.errors import ArgumentTypeError, StateDivergenceError
from jaxdist.program._exact import exact_graph


@dataclasses.dataclass(frozen=True)
class GraphShape:
    """What is static of the NNX objects of a call; part of the program's key."""

    graphdef: Any = dataclasses.field(compare=False)
    # What is compared of it.
    exact: Any
    treedef: PyTreeDef
    paths: tuple[tuple[Any, ...], ...]
    types: tuple[type, ...]
    # What the caller calls the objects; two calls that differ in it run the same program.
    arguments: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def merge(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """New NNX objects of this shape that hold `leaves`."""
        state = jax.tree.unflatten(self.treedef, leaves)
        merged: tuple[Any, ...] = nnx.merge(self.graphdef, state)
        return merged

    def leaves_of(self, nodes: tuple[Any, ...]) -> list[Any]:
        """The leaves of `nodes`, which a step was run on; the graph must be as it was."""
        after, leaves = shape_of(nodes)
        if after.exact != self.exact or after.treedef != self.treedef:
            raise StateDivergenceError(self._changed(after))
        return leaves

    def name(self, leaf: int) -> str:
        """A name for leaf number `leaf`, such as `args[0].layers[1].kernel`."""
        return self._named(self.paths[leaf])

    def _named(self, path: tuple[Any, ...]) -> str:
        head, *rest = path
        parts = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in rest)
        return f"{self.arguments[head]}{parts}"

    def _changed(self, after: "GraphShape") -> str:
        more = [self._named(p) for p in after.paths if p not in self.paths]
        less = [self._named(p) for p in self.paths if p not in after.paths]
        what = "; ".join(
            f"{word} {names[:5]}" for word, names in (("added", more), ("removed", less)) if names
        )
        return (
            "The step changed the structure of the NNX objects that it was given: "
            f"{what or 'an attribute that is not a variable got another value'}.\n\n"
            "A step may change the values of variables; which variables there are is fixed when "
            "it is compiled.\n\n"
            "Create variables (and set modes such as model.eval()) before strategy.run."
        )


def shape_of(
    nodes: tuple[Any, ...], arguments: tuple[str, ...] = ()
) -> tuple[GraphShape, list[Any]]:
    """The static part of NNX objects, and their leaves; `arguments` are names for messages."""
    graphdef, state = nnx.split(nodes)
    leaves, treedef = jax.tree.flatten(state)
    flat = [
        (path, type(variable))
        for path, variable in nnx.to_flat_state(state)
        for _ in jax.tree.leaves(variable)
    ]
    paths = tuple(path for path, _ in flat)
    types = tuple(kind for _, kind in flat)
    return GraphShape(graphdef, exact_graph(graphdef), treedef, paths, types, arguments), leaves


class KeptGraph:
    """The NNX objects of a call, with a flat list of their variables kept ready.

    Splitting a model costs milliseconds; reading a kept list costs microseconds. Whether the
    graph is still the one that was listed is seen from the attributes of every object in it,
    compared by identity.
    """

    def __init__(
        self, nodes: tuple[Any, ...], arguments: tuple[str, ...], forget: Callable[[Any], object]
    ) -> None:
        # The list holds the variables, so it goes when one of the objects goes.
        self._roots = tuple(weakref.ref(n, forget) for n in nodes)
        # The C++ call paths of the step that runs on these objects, by plan and static arguments.
        self.dispatchers: dict[Any, dict[Any, Callable[..., Any]]] = {}
        self.shape, leaves = shape_of(nodes, arguments)
        by_path: dict[Any, Any] = {}
        self._attributes: list[dict[str, Any]] = []
        self._lists: list[list[Any]] = []
        for path, value in nnx.iter_graph(nodes):
            if isinstance(value, nnx.Variable):
                by_path.setdefault(path, value)
            elif isinstance(value, nnx.Pytree):
                self._attributes.append(vars(value))
            elif isinstance(value, dict):
                self._attributes.append(value)
            elif isinstance(value, list):
                self._lists.append(value)
        self._seen = list(self._held())
        missing = [p for p in self.shape.paths if p not in by_path]
        if missing or len(set(self.shape.paths)) != len(leaves):
            raise ArgumentTypeError(
                "strategy.run was given NNX objects that hold arrays outside variables: "
                f"{[self.shape.name(self.shape.paths.index(p)) for p in missing][:5]}.\n\n"
                "Only variables can be updated in place.\n\n"
                "Wrap the array: nnx.Param(x), or nnx.Variable(x) if it is not trained."
            )
        self.variables = [by_path[p] for p in self.shape.paths]

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The NNX objects; they are not kept alive from here."""
        return tuple(r() for r in self._roots)

    def is_current(self) -> bool:
        """Whether no object of the graph has had an attribute replaced, added or removed."""
        count = sum(map(len, self._attributes)) + sum(map(len, self._lists))
        return count == len(self._seen) and all(map(operator.is_, self._held(), self._seen))

    def _held(self) -> Iterator[Any]:
        attributes = itertools.chain.from_iterable(map(dict.values, self._attributes))
        return itertools.chain(attributes, itertools.chain.from_iterable(self._lists))

    def read(self) -> list[Any]:
        """The values of all variables."""
        return [v.get_raw_value() for v in self.variables]

    def write(self, values: Sequence[Any]) -> None:
        """Give every variable its new value; an interruption leaves none half done."""
        try:
            _compat.set_variables(self.variables, values)
        except KeyboardInterrupt:
            _compat.set_variables(self.variables, values)
            raise
