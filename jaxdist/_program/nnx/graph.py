"""Flax NNX objects as arguments: their variables go in as leaves and come back in place."""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import PyTreeDef, treedef_is_leaf

from jaxdist import _compat
from jaxdist._program.nnx.exact_contents import exact_graph
from jaxdist._values import Sharded, is_leaked, is_sharded, leaked
from jaxdist.errors import ArgumentTypeError, ContextError, StateDivergenceError


@dataclasses.dataclass(frozen=True)
class GraphShape:
    """What is static of the NNX objects of a call; part of the program's key."""

    graphdef: Any = dataclasses.field(compare=False)
    # What is compared of it. See Note [Equal constants]
    exact: Any
    treedef: PyTreeDef
    paths: tuple[tuple[Any, ...], ...]
    types: tuple[type, ...]
    # What the caller calls the objects; two calls that differ in it run the same program.
    arguments: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # Numbers of the count, the mean and the squared deviations of each `nnx.metrics.Welford`.
    moments: tuple[tuple[int, int, int], ...] = dataclasses.field(default=(), compare=False)

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

    def values_of(self, nodes: tuple[Any, ...]) -> list[Any]:
        """The same, with arrays in pieces as they are."""
        self.leaves_of(nodes)
        return jax.tree.leaves(nnx.split(nodes)[1], is_leaf=is_sharded)

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
    exact = exact_graph(graphdef)
    moments = _moments(nodes, paths)
    return GraphShape(graphdef, exact, treedef, paths, types, arguments, moments), leaves


def _moments(nodes: tuple[Any, ...], paths: tuple[Any, ...]) -> tuple[tuple[int, int, int], ...]:
    number = {path: i for i, path in enumerate(paths)}
    found = []
    for path, value in nnx.iter_graph(nodes):
        if isinstance(value, nnx.metrics.Welford):
            three = [number.get((*path, name), -1) for name in ("count", "mean", "m2")]
            if -1 not in three:
                found.append((three[0], three[1], three[2]))
    return tuple(found)


class CachedGraph:
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
        self.shape, _ = shape_of(nodes, arguments)
        by_path: dict[Any, Any] = {}
        self._attributes: list[dict[str, Any]] = []
        self._lists: list[Any] = []
        for path, value in nnx.iter_graph(nodes):
            if isinstance(value, nnx.Variable):
                by_path.setdefault(path, value)
            elif isinstance(value, nnx.Pytree):
                self._watch(vars(value))
            elif isinstance(value, (dict, list)):
                self._watch(value)
        self._seen = list(self._held())
        missing = [p for p in self.shape.paths if p not in by_path]
        if missing:
            raise ArgumentTypeError(
                "strategy.run was given NNX objects that hold arrays outside variables: "
                f"{[self.shape.name(self.shape.paths.index(p)) for p in missing][:5]}.\n\n"
                "Only variables can be updated in place.\n\n"
                "Wrap the array: nnx.Param(x), or nnx.Variable(x) if it is not trained."
            )
        self.variables = [by_path[p] for p in dict.fromkeys(self.shape.paths)]
        # Of variables that hold a pytree (what `sow` leaves is a tuple), the structure of each.
        found = list(self._structures_now())
        self._structures = None if all(map(treedef_is_leaf, found)) else found

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The NNX objects; they are not kept alive from here."""
        return tuple(r() for r in self._roots)

    def is_current(self) -> bool:
        """Whether no object of the graph has had an attribute replaced, added or removed."""
        count = sum(map(len, self._attributes)) + sum(map(len, self._lists))
        is_same = count == len(self._seen) and all(map(operator.is_, self._held(), self._seen))
        if self._structures is None:
            return is_same
        return is_same and all(map(operator.eq, self._structures_now(), self._structures))

    def _structures_now(self) -> Iterator[PyTreeDef]:
        """An array in pieces is one leaf: its node says how it is cut."""
        values = (v.get_raw_value() for v in self.variables)
        return (jax.tree.structure(value, is_leaf=is_sharded) for value in values)

    def _watch(self, container: Any) -> None:
        """Look at what a container holds, and at the plain containers in it, at every call."""
        if isinstance(container, dict):
            self._attributes.append(container)
            inside = container.values()
        else:
            self._lists.append(container)
            inside = container
        for value in inside:
            if type(value) in (dict, list, set) and not any(
                value is c for c in (*self._attributes, *self._lists)
            ):
                self._watch(value)

    def _held(self) -> Iterator[Any]:
        attributes = itertools.chain.from_iterable(map(dict.values, self._attributes))
        return itertools.chain(attributes, itertools.chain.from_iterable(self._lists))

    def read(self) -> list[Any]:
        """The leaves of all variables."""
        held = [v.get_raw_value() for v in self.variables]
        return held if self._structures is None else jax.tree.leaves(held, is_leaf=is_sharded)

    def leak(self, caller: str) -> ContextError | None:
        """The error for a variable with a value that outlived its trace, if there is one."""
        for number, leaf in enumerate(self.read()):
            value = leaf.held if isinstance(leaf, Sharded) else leaf
            if is_leaked(value):
                return leaked(f"{caller} was given {self.shape.name(number)}, ", value)
        return None

    def write(self, values: Sequence[Any]) -> None:
        """Give every variable its new value; an interruption leaves none half done."""
        if self._structures is not None:
            leaves = iter(values)
            values = [
                jax.tree.unflatten(s, list(itertools.islice(leaves, s.num_leaves)))
                for s in self._structures
            ]
        try:
            _compat.set_variables(self.variables, values)
        except KeyboardInterrupt:
            _compat.set_variables(self.variables, values)
            raise
