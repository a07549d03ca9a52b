"""Flattens calls: decides which leaves are traced, which are static, and which are NNX objects."""

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import PyTreeDef, keystr, register_pytree_node

from jaxdist import _compat
from jaxdist._called import name_argument, name_call, refuse_type
from jaxdist._collectives import check_supported
from jaxdist._integers import check_all_fit, has_unfit
from jaxdist._program.arguments.exact import exact
from jaxdist._program.arguments.opaque import find_array, hidden_array_error
from jaxdist._values import (
    Assignable,
    BatchSource,
    HeldPieces,
    PerReplica,
    Sharded,
    Stop,
    explain_too_large,
    is_container,
    list_arrays,
    open_containers,
    refuse_leaked,
    stops,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError


class Static:
    """A static value of a call: a pytree node without leaves that unflattens to the bare value."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        # See Note [Equal constants]
        self.key = exact(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


# Unflattening returns the bare value. A result that contains a string therefore needs no second
# pass over its leaves.
register_pytree_node(Static, lambda s: ((), s), lambda s, _: s.value)


class VariableItself(Static):
    """A variable that is an argument. It behaves like a variable from the closure of the step."""

    # By identity: the value of a variable changes between calls and is not part of the program.

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableItself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


register_pytree_node(VariableItself, lambda s: ((), s), lambda s, _: s.value)


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNode:
    """A placeholder for the `index`-th NNX object of a call."""

    index: int


@dataclasses.dataclass(slots=True)
class Flat:
    """The flattened arguments of one call.

    `slots[i]` describes leaf `i` of `treedef`. It is an index into `dynamic`, a `Static`, or a
    `GraphNode`, which is an index into `nodes`.
    """

    given: tuple[Any, Any]  # `(args, kwargs)`; static arguments are wrapped in `Static`
    treedef: PyTreeDef
    slots: tuple[Any, ...]
    dynamic: list[Any]
    nodes: list[Any]
    has_tracer: bool
    # Whether JAX's call path would pass some array without its padding.
    # See Note [Padding in nodes].
    lost_padding: bool = False

    def paths(self) -> list[Any]:
        """Return the pytree paths of all slots. They are not cached, and computing them is slow."""
        return [p for p, _ in jax.tree_util.tree_flatten_with_path(self.given, is_leaf=is_unit)[0]]

    def name(self, number: int) -> str:
        """Return the name of dynamic leaf `number`."""
        return self.name_of_slot(self.slots.index(number))

    def name_of_slot(self, position: int) -> str:
        """Return the name of the leaf at this position of `slots`."""
        return name_argument(argument_name(self.paths()[position]), of="strategy.run")

    def names(self) -> list[str]:
        """Return the names of all dynamic leaves."""
        paths = zip(self.paths(), self.slots, strict=True)
        return [argument_name(p) for p, s in paths if not isinstance(s, (Static, GraphNode))]

    def node_names(self) -> tuple[str, ...]:
        """Return the name of each NNX object: the first place where it occurs."""
        names: dict[int, str] = {}
        for path, slot in zip(self.paths(), self.slots, strict=True):
            if isinstance(slot, GraphNode):
                names.setdefault(slot.index, argument_name(path))
        return tuple(names[i] for i in range(len(names)))


def is_static(x: Any) -> bool:
    """Whether a leaf is a part of the program; flattening stops there."""
    return isinstance(x, Static)


# Whether flattening the arguments of a call stops at a value.
is_unit = stops(Stop.ARGUMENTS, Static)


def flatten(
    args: Any,
    kwargs: Any,
    static_names: frozenset[str] = frozenset(),
    static_numbers: frozenset[int] = frozenset(),
) -> Flat:
    """Flatten a call. The arguments with these names and positions are static as a whole."""
    given = (
        tuple(Static(a) if i in static_numbers else a for i, a in enumerate(args)),
        {k: Static(v) if k in static_names else v for k, v in kwargs.items()},
    )
    leaves, treedef = jax.tree_util.tree_flatten(given, is_leaf=is_unit)
    if any(is_container(leaf) and not is_unit(leaf) for leaf in leaves):
        given = _open_containers(given)
        leaves, treedef = jax.tree_util.tree_flatten(given, is_leaf=is_unit)
    slots: list[Any] = []
    dynamic: list[Any] = []
    nodes: list[Any] = []
    has_tracer = lost_padding = False
    for leaf in leaves:
        if isinstance(leaf, HeldPieces):
            leaf = leaf.sharded()
        elif isinstance(leaf, Sharded):
            lost_padding = lost_padding or leaf.has_padding
        if isinstance(leaf, nnx.Pytree):
            index = next((i for i, n in enumerate(nodes) if n is leaf), len(nodes))
            if index == len(nodes):
                nodes.append(leaf)
            slots.append(GraphNode(index))
        elif isinstance(leaf, Assignable):
            slots.append(VariableItself(leaf))
        elif is_dynamic(leaf):
            has_tracer = has_tracer or is_traced(leaf)
            slots.append(len(dynamic))
            dynamic.append(leaf)
        else:
            slots.append(leaf if isinstance(leaf, Static) else Static(leaf))
    return Flat(given, treedef, tuple(slots), dynamic, nodes, has_tracer, lost_padding)


def _open_containers(given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Open those containers in the arguments that are not pytree nodes to JAX."""

    # A hashable container without arrays can stay static. Others must be opened: an array would
    # become a constant, and an unhashable container cannot be part of the program's key.

    def must_open(container: Any) -> bool:
        return type(container).__hash__ is None or find_array(container) is not None

    def open_one(name: str, value: Any) -> Any:
        return open_containers(value, name, is_leaf=is_unit, must_open=must_open, rebuilds=True)

    args, kwargs = given
    return (
        tuple(open_one(f"args[{i}]", a) for i, a in enumerate(args)),
        {k: open_one(f"kwargs[{k!r}]", v) for k, v in kwargs.items()},
    )


def check_call(flat: Flat, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for an argument that can be neither an input nor a constant of a program."""
    _check_hashable(flat)
    _check_not_leaked(flat)
    _check_dtypes(flat)
    _check_no_bare_variable(args, kwargs)


def check_no_arrays_hidden(flat: Flat) -> None:
    """Raise for an object that holds arrays but is not a pytree: they would become constants."""
    for position, slot in enumerate(flat.slots):
        if not isinstance(slot, Static) or isinstance(slot, VariableItself):
            continue
        where = find_array(slot.value)
        if where is not None:
            raise hidden_array_error(flat.name_of_slot(position), slot.value, where)


def check_no_refs(flat: Flat) -> None:
    """Raise for a mutable array of `jax.new_ref`: a step cannot write to the caller's."""
    for position, slot in enumerate(flat.slots):
        value = flat.dynamic[slot] if type(slot) is int else getattr(slot, "value", None)
        if _compat.is_mutable(value):
            what = f"{name_call()} was given {flat.name_of_slot(position)}, a jax.Ref"
            raise ArgumentTypeError(explain_ref(what))


def explain_ref(what: str) -> str:
    """Return the error message for a mutable array that would enter or leave a step."""
    return (
        f"{what} (a mutable array of jax.new_ref).\n\n"
        "A jax.Ref lives on one device, and each replica of a step would write to its own copy. "
        "A step can use refs that it creates itself.\n\n"
        "Keep the value in a jaxdist.Variable made in strategy.scope(): steps read and assign it, "
        "and the strategy keeps the replicas equal. Or pass ref[...], return the new value, and "
        "write it after the step: ref[...] = strategy.run(step, (ref[...], x))."
    )


def _check_not_leaked(flat: Flat) -> None:
    """Raise for a tracer whose trace has ended."""
    # Inside another trace, tracers are ordinary arguments.
    if not flat.has_tracer or _compat.is_inside_trace():
        return
    for number, leaf in enumerate(flat.dynamic):
        for part in [leaf.held] if isinstance(leaf, Sharded) else jax.tree.leaves(leaf):
            refuse_leaked(flat.name(number), part)


def is_dynamic(leaf: Any) -> bool:
    """Whether a leaf is traced: an array, or a number that is neither a bool nor an enum."""
    arrays = (jax.Array, np.ndarray, np.generic, PerReplica, Sharded, jax.ShapeDtypeStruct)
    if isinstance(leaf, arrays):
        return True
    if isinstance(leaf, (bool, enum.Enum)):
        return False
    return isinstance(leaf, (int, float, complex)) or hasattr(leaf, "__jax_array__")


def is_traced(leaf: Any) -> bool:
    """Whether a leaf that is not a static argument holds a traced array."""
    if isinstance(leaf, Sharded):
        leaf = leaf.held
    if isinstance(leaf, PerReplica):
        return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaf))
    return isinstance(leaf, jax.core.Tracer)


def _check_hashable(flat: Flat) -> None:
    """Raise for a leaf that is neither an array nor a pytree nor hashable; the error names it.

    Also raise for an iterator: as a static value it would be advanced only once, while tracing.
    """
    for position, slot in enumerate(flat.slots):
        if not isinstance(slot, Static):
            continue
        if isinstance(slot.value, Iterator) and not isinstance(slot.value, BatchSource):
            name = flat.name_of_slot(position)
            raise refuse_type(
                f"{name}, an iterator ({type(slot.value).__name__}).",
                "A value that is neither an array nor a pytree becomes part of the program: the "
                "step would take one element while it is traced, and all later calls would use it.",
                f"Take the element outside and pass it: next({name}). jaxdist.function takes the "
                "iterator of strategy.experimental_distribute_dataset(dataset) as an argument, and "
                "then gives new batches at every call.",
            )
        try:
            hash(slot)
        except TypeError as error:
            raise ArgumentTypeError(
                f"{name_call()} cannot take {flat.name_of_slot(position)}: it is a "
                f"{type(slot.value).__name__}, which is neither an array nor a pytree, and cannot "
                "be hashed.\n\n"
                "Such an object becomes part of the program, and its hash and equality decide "
                "when to compile again.\n\n"
                "Register its class as a pytree (jax.tree_util.register_dataclass), make it "
                "hashable, or pass the arrays that it holds."
            ) from error


def _check_dtypes(flat: Flat) -> None:
    """Raise for an array whose elements are not numbers that JAX has."""
    for number, leaf in enumerate(flat.dynamic):
        is_numpy = isinstance(leaf, (np.ndarray, np.generic))
        if is_numpy and _is_unknown(leaf):
            check_supported(f"cannot take {flat.name(number)}", leaf)
        if is_numpy and leaf.dtype.names is not None and leaf.dtype != jax.dtypes.float0:
            raise refuse_type(
                f"{flat.name(number)}, an array with the fields {list(leaf.dtype.names)}.",
                "Each array in a step holds numbers of one dtype.",
                "Pass the fields as a dict of arrays: {k: array[k] for k in array.dtype.names}.",
            )
        if is_numpy and leaf.dtype.kind in "OSUmM":
            raise refuse_type(
                f"{flat.name(number)}, an array of {leaf.dtype} with shape {list(leaf.shape)}.",
                "Arrays in a step hold numbers or bools: JAX has no text, dates or Python objects.",
                "Pass numbers, such as ids instead of text, or a tuple of the values, which "
                "becomes part of the program.",
            )
        if type(leaf) is int and not -(1 << 31) <= leaf < 1 << 31:
            bounds = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
            if not bounds.min <= leaf <= bounds.max:
                raise ArgumentError(
                    f"{name_call()} was given {flat.name(number)}={leaf}, and "
                    f"{explain_too_large(leaf, bounds)}"
                )
        if has_unfit(list_arrays(leaf)):
            check_all_fit(flat.name(number), leaf)


def _is_unknown(leaf: Any) -> bool:
    """Whether an array is masked, or its numbers are long or in another byte order."""
    dtype = leaf.dtype
    most = 16 if dtype.kind == "c" else 8
    is_other = dtype.kind in "fciu" and (not dtype.isnative or dtype.itemsize > most)
    return is_other or isinstance(leaf, np.ma.MaskedArray)


def _check_no_bare_variable(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for a Flax variable that is itself an argument: its assignments would be lost."""
    named = [*((f"args[{i}]", a) for i, a in enumerate(args))]
    named += [(f"kwargs[{k!r}]", v) for k, v in kwargs.items()]
    for name, value in named:
        if isinstance(value, nnx.Variable):
            raise refuse_type(
                f"{name}, a {type(value).__name__} on its own.",
                "JAX treats it as its value, so a step could read it, but what the step writes to "
                "it would be lost.",
                "Pass its value, variable[...], where it is only read; pass the module that holds "
                "it, or nnx.Dict(value=variable), where it is written.",
            )


def argument_name(path: Any) -> str:
    """Return a path within `(args, kwargs)` as the caller would write it, as `args[1]['x']`."""
    head = "args" if path[0].idx == 0 else "kwargs"
    return head + keystr(path[1:])


def unflatten(treedef: PyTreeDef, slots: tuple[Any, ...], dynamic: Any, nodes: Any) -> Any:
    """Build `(args, kwargs)` from new values for the traced leaves and new NNX objects."""
    leaves = [_fill_slot(s, dynamic, nodes) for s in slots]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _fill_slot(slot: Any, dynamic: Any, nodes: Any) -> Any:
    if isinstance(slot, GraphNode):
        return nodes[slot.index]
    return slot.value if isinstance(slot, Static) else dynamic[slot]
