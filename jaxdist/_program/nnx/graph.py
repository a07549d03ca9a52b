"""Flax NNX objects as arguments: their variables are inputs, and are updated in place."""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import PyTreeDef, treedef_is_leaf

from jaxdist import _compat
from jaxdist._called import called, name_call, refuse_type
from jaxdist._program.arguments.arguments import Flat
from jaxdist._program.arguments.exact import exact
from jaxdist._values import is_leaked, is_sharded, list_arrays, make_leak_error
from jaxdist.errors import ArgumentTypeError, ContextError, StateDivergenceError


@dataclasses.dataclass(frozen=True)
class GraphShape:
    """The static part of a call's NNX objects, which is a part of the program's key."""

    graphdef: Any = dataclasses.field(compare=False)
    # The part that is compared; see Note [Equal constants]
    exact_key: Any
    treedef: PyTreeDef
    paths: tuple[tuple[Any, ...], ...]
    types: tuple[type, ...]
    # The caller's names of the objects. Calls that differ only in the names share a program.
    arguments: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    # Leaf numbers of the count, the mean and the squared deviations of each
    # `nnx.metrics.Welford`.
    moments: tuple[tuple[int, int, int], ...] = dataclasses.field(default=(), compare=False)

    def merge(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return new NNX objects of this shape that hold `leaves`."""
        state = jax.tree.unflatten(self.treedef, leaves)
        return nnx.merge(self.graphdef, state)

    def leaves_of(self, nodes: tuple[Any, ...]) -> list[Any]:
        """Return the leaves of `nodes` after a step; raise if the step changed their structure."""
        after, leaves = split_objects(nodes)
        same = after.paths == self.paths and is_same_but_for_states(
            self.treedef, after.treedef, leaves
        )
        if after.exact_key != self.exact_key or not same:
            raise StateDivergenceError(self._describe_change(after))
        return leaves

    def values_of(self, nodes: tuple[Any, ...]) -> list[Any]:
        """Return the same leaves, but each `Sharded` array as one leaf."""
        # Checks that the structure is unchanged.
        self.leaves_of(nodes)
        return jax.tree.leaves(nnx.split(nodes)[1], is_leaf=is_sharded)

    def name(self, leaf: int) -> str:
        """Return the name of leaf number `leaf`, such as `args[0].layers[1].kernel`."""
        return self._path_name(self.paths[leaf])

    def _path_name(self, path: tuple[Any, ...]) -> str:
        head, *rest = path
        return f"{self.arguments[head]}{path_suffix(rest)}"

    def _describe_change(self, after: "GraphShape") -> str:
        more = [self._path_name(p) for p in after.paths if p not in self.paths]
        less = [self._path_name(p) for p in self.paths if p not in after.paths]
        what = "; ".join(
            f"{word} {names[:5]}" for word, names in (("added", more), ("removed", less)) if names
        )
        return (
            "The step changed the structure of the NNX objects that it was given: "
            f"{what or 'an attribute that is not a variable got another value'}.\n\n"
            "A step may change the values of variables; which variables exist is fixed when "
            "it is compiled.\n\n"
            "Create variables (and set modes such as model.eval()) before strategy.run."
        )


def is_same_but_for_states(before: Any, after: Any, leaves: Sequence[Any]) -> bool:
    """Whether the only change is that `nnx.State`s hold what lists, tuples or dicts held.

    `nnx.Optimizer.update` leaves them in variables whose value is such a container, as those of
    `optax.sm3` are. The caller's variables keep their containers.

    Args:
        before: The structure of the state before the step.
        after: The structure after it.
        leaves: The leaves after it.
    """
    if before == after:
        return True
    if before.num_leaves != after.num_leaves:
        return False
    of_before, of_after = (
        {path: v.get_raw_value() for path, v in nnx.to_flat_state(jax.tree.unflatten(t, leaves))}
        for t in (before, after)
    )
    return list(of_before) == list(of_after) and all(
        jax.tree.structure(a) == jax.tree.structure(b)
        or (isinstance(b, nnx.State) and _list_keys(a) == _list_keys(b))
        for a, b in zip(of_before.values(), of_after.values(), strict=True)
    )


def _list_keys(value: Any) -> list[str]:
    """Return the path of each leaf; the keys of a list are its indices."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]


def path_suffix(path: Iterable[Any]) -> str:
    """Return the path of an attribute as Python writes it, such as `.layers[1].kernel`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)


def split_objects(
    nodes: tuple[Any, ...], arguments: tuple[str, ...] = ()
) -> tuple[GraphShape, list[Any]]:
    """Return the static part of NNX objects, and their leaves.

    Args:
        nodes: The NNX objects.
        arguments: Their names in error messages.
    """
    with _compat.show_distant_objects():
        graphdef, state = nnx.split(nodes)
        leaves, treedef = jax.tree.flatten(state, is_leaf=_compat.is_distant)
        # One entry for each leaf: the value of a variable may be a pytree.
        flat = [
            (path, type(variable))
            for path, variable in nnx.to_flat_state(state)
            for _ in jax.tree.leaves(variable, is_leaf=_compat.is_distant)
        ]
    paths = tuple(path for path, _ in flat)
    types = tuple(kind for _, kind in flat)
    key, moments = exact_graph(graphdef), _find_moments(nodes, paths)
    return GraphShape(graphdef, key, treedef, paths, types, arguments, moments), leaves


def _find_moments(
    nodes: tuple[Any, ...], paths: tuple[Any, ...]
) -> tuple[tuple[int, int, int], ...]:
    # A subclass may lack one of the three variables. Then it cannot be merged as a running mean.
    number = {path: i for i, path in enumerate(paths)}
    found = []
    for path, value in nnx.iter_graph(nodes):
        if isinstance(value, nnx.metrics.Welford):
            three = [number.get((*path, name), -1) for name in ("count", "mean", "m2")]
            if -1 not in three:
                found.append((three[0], three[1], three[2]))
    return tuple(found)


class CachedGraph:
    """The NNX objects of a call, with a cached flat list of their variables.

    Splitting a model costs milliseconds; reading the cached list costs microseconds. `is_current`
    checks whether the list is still valid: it compares the attributes of every object in the graph
    by identity.
    """

    def __init__(
        self, nodes: tuple[Any, ...], arguments: tuple[str, ...], forget: Callable[[Any], object]
    ) -> None:
        # The list keeps the variables alive, so it is dropped when one of the objects dies.
        self._roots = tuple(weakref.ref(n, forget) for n in nodes)
        # C++ dispatchers of the step for these objects, by call template and static arguments.
        self.dispatchers: dict[Any, dict[Any, Callable[..., Any]]] = {}
        self.shape, _ = split_objects(nodes, arguments)
        by_path: dict[Any, Any] = {}
        places: dict[Any, Any] = {}
        self._attributes: list[dict[str, Any]] = []
        self._lists: list[Any] = []
        for path, value in nnx.iter_graph(nodes):
            places.setdefault(path, value)
            if isinstance(value, nnx.Variable):
                by_path.setdefault(path, value)
            elif isinstance(value, nnx.Pytree):
                self._watch(vars(value))
            elif isinstance(value, (dict, list)):
                self._watch(value)
        self._seen = list(self._iterate_contents())
        # A variable of our own, and the place, for each array outside of variables, such as the
        # scales of `nnx.WeightNorm`.
        self._outside: list[tuple[nnx.Variable[Any], Any, Any]] = []
        known_paths = dict.fromkeys(self.shape.paths)
        for path in (p for p in known_paths if p not in by_path):
            self._outside.append(self._hold(path, places))
            by_path[path] = self._outside[-1][0]
        self.variables = [by_path[p] for p in known_paths]
        # The structure of each variable's value. `sow`, for instance, stores a tuple. None if each
        # value is one leaf, so that the common case pays nothing.
        found = list(self._iterate_structures())
        self._structures = None if all(map(treedef_is_leaf, found)) else found
        # Values that `read` took from other places, to compare with what is written.
        self._lent: Sequence[Any] = ()

    @called("strategy.run")
    def _hold(
        self, path: tuple[Any, ...], places: dict[Any, Any]
    ) -> tuple[nnx.Variable[Any], Any, Any]:
        """Return a variable for an array outside of variables, the object that has it, and its key.

        Raises:
            ArgumentTypeError: The object's array cannot be replaced.
        """
        around = places.get(path[:-1])
        is_known = isinstance(around, (nnx.Pytree, dict, list)) and path in places
        if is_known and isinstance(places[path], jax.Array):
            return nnx.Variable(places[path]), around, path[-1]
        raise refuse_type(
            "NNX objects that hold arrays outside variables: "
            f"{self.shape.name(self.shape.paths.index(path))}.",
            "Only variables, and arrays of JAX in attributes, dicts and lists, can be updated in "
            "place.",
            "Wrap the array: nnx.Param(x), or nnx.Variable(x) if it is not trained.",
        )

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The NNX objects. Only weak references to them are stored."""
        return tuple(r() for r in self._roots)

    def is_current(self) -> bool:
        """Whether no attribute in the graph was replaced, added or removed since the listing."""
        # Counting first: `map` stops at the shorter list and would not see an added attribute.
        count = sum(map(len, self._attributes)) + sum(map(len, self._lists))
        if count != len(self._seen) or not all(
            map(operator.is_, self._iterate_contents(), self._seen)
        ):
            return False
        found = self._structures
        return found is None or all(map(operator.eq, self._iterate_structures(), found))

    def _iterate_structures(self) -> Iterator[PyTreeDef]:
        """Yield the structure of each variable's value; a `Sharded` array counts as one leaf."""
        values = map(_compat.get_held, self.variables)
        return (jax.tree.structure(value, is_leaf=_is_one) for value in values)

    def _watch(self, container: Any) -> None:
        """Register a container, and the plain containers in it, to be compared at every call."""
        is_dict = isinstance(container, dict)
        (self._attributes if is_dict else self._lists).append(container)
        for value in container.values() if is_dict else container:
            # By identity: containers may refer to each other in a circle.
            if type(value) in (dict, list, set) and not any(
                value is c for c in (*self._attributes, *self._lists)
            ):
                self._watch(value)

    def _iterate_contents(self) -> Iterator[Any]:
        attributes = itertools.chain.from_iterable(map(dict.values, self._attributes))
        return itertools.chain(attributes, itertools.chain.from_iterable(self._lists))

    def read(self) -> list[Any]:
        """Return the leaves of all variables."""
        held = [v.get_raw_value() for v in self.variables]
        self._lent = _compat.find_lent(self.variables, held)
        return held if self._structures is None else jax.tree.leaves(held, is_leaf=is_sharded)

    def find_leak(self) -> ContextError | None:
        """Return the error for a variable that holds a tracer of an ended trace, or None."""
        for number, value in enumerate(list_arrays(self.read())):
            if is_leaked(value):
                start = f"{name_call()} was given {self.shape.name(number)}, "
                return make_leak_error(start, value)
        return None

    def write(self, values: Sequence[Any]) -> None:
        """Assign a new value to every variable. An interrupt does not leave it half done."""
        if self._structures is not None:
            leaves = iter(values)
            values = [
                jax.tree.unflatten(s, list(itertools.islice(leaves, s.num_leaves)))
                for s in self._structures
            ]
        try:
            _compat.set_variables(self.variables, values)
            self._lent = ()
            # Ctrl-C may come between two assignments. Without this, some variables would have
            # values from before the step and others from after it.
        except KeyboardInterrupt:
            _compat.set_variables(self.variables, values)
            raise
        finally:
            for variable, around, key in self._outside:
                if isinstance(around, nnx.Pytree):
                    setattr(around, key, variable.get_raw_value())
                else:
                    around[key] = variable.get_raw_value()
            if self._outside:
                self._seen = list(self._iterate_contents())


def _is_one(value: Any) -> bool:
    return is_sharded(value) or _compat.is_distant(value)


def exact_graph(graphdef: Any) -> Any:
    """Return the key of the static part of NNX objects, whose lists cannot be hashed.

    Raises:
        ArgumentTypeError: An attribute, or something in it, cannot be hashed.
    """
    # Flax stores static attributes with a `value`; other attributes are only markers, which are
    # compared themselves.
    attributes = (
        (exact(name), exact_contents(getattr(mark, "value", mark), f"The attribute {name!r}"))
        for name, mark in graphdef.attributes
    )
    return tuple(map(exact, graphdef.nodes)), tuple(attributes)


def exact_contents(value: Any, name: str) -> Any:
    """Return a key like `exact`, also for dicts, lists and sets. A changed container has a new key.

    Args:
        value: A number, a string, a container, or any hashable object.
        name: The name of the value in error messages.

    Raises:
        ArgumentTypeError: The value, or something in it, cannot be hashed.
    """
    kind = type(value)
    if isinstance(value, dict):
        items = value.items()
        return kind, tuple((exact(k), exact_contents(v, f"{name}[{k!r}]")) for k, v in items)
    if kind in (list, tuple):
        return kind, tuple(exact_contents(v, f"{name}[{i}]") for i, v in enumerate(value))
    if kind in (set, frozenset):
        return kind, frozenset(exact_contents(v, name) for v in value)
    key = exact(value)
    try:
        hash(key)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {value!r}, of type {kind.__name__}, which cannot be hashed.\n\n"
            "What an NNX object holds besides its variables is part of the program, so jaxdist "
            "compares it with earlier values.\n\n"
            "Use numbers, strings, tuples, lists, dicts, or a class with __hash__ and __eq__ "
            "(@dataclass(frozen=True)); put arrays into nnx.Variable."
        ) from None
    return key


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
