"""Operations of traced steps as flat lists, and their values in all groups of replicas."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.arguments.exact import exact, has_known_bits, same_bits
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import iterate_with_inner, open_jaxpr
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._typing import AxisNames

# Parameters that differ between two traces of one function and do not change the results. They are
# rules for derivatives, which JAX has already applied when a trace is evaluated.
_OF_DERIVATIVES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees", "name"})


class Key:
    """A value of a flat list of operations."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Const:
    """An array that the step closed over."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A value of all groups: padded to one shape, with its real shape in each group."""

    value: Any
    shapes: tuple[tuple[int, ...], ...]  # by group


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation: an equation, its operands, its results, and whether it communicates."""

    eqn: Any
    inputs: tuple[Any, ...]  # of Key, Literal or Const
    outputs: tuple[Key, ...]
    has_collective: bool

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name


def abstract(atom: Any) -> Any:
    """Return the aval of an atom, or the array itself."""
    return atom.value if isinstance(atom, Const) else atom.aval


def dtype_of(atom: Any) -> Any:
    """Return the dtype of an atom."""
    return jnp.asarray(atom.value).dtype if isinstance(atom, Const) else atom.aval.dtype


def has_collective(eqn: Any) -> bool:
    """Whether an equation is a collective over named axes, or holds a program with one."""
    return any(
        e.primitive.name in known.COLLECTIVES and bool(get_named_axes(e.params))
        for e in iterate_with_inner(eqn)
    )


def flatten_ops(
    jaxpr: Any, arguments: list[Any], inlined: frozenset[str] = frozenset()
) -> tuple[list[Op], list[Any]]:
    """Return the operations of a program, and its results.

    Args:
        jaxpr: An open or closed program.
        arguments: A `Key` or `Const` for each input.
        inlined: Names of calls to inline. Calls that communicate are always inlined.
    """
    flat = FlatList(inlined)
    results = flat.run(jaxpr, arguments)
    return flat.ops, results


class FlatList(Interpreter[Any]):
    """An interpreter that collects operations; a value is a `Key`, `Literal` or `Const`."""

    def __init__(self, inlined: frozenset[str]) -> None:
        self.ops: list[Op] = []
        self._inlined = inlined

    def literal(self, literal: Any) -> Any:
        return literal

    def constant(self, variable: Any, value: Any) -> Any:
        return Const(value)

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        outputs = [Key(v.aval) for v in eqn.outvars]
        self.ops.append(Op(eqn, tuple(inputs), tuple(outputs), has_collective(eqn)))
        return outputs

    def call(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        # A user's `shard_map` has mesh axes of its own, so it stays one operation.
        name = eqn.primitive.name
        inside = name in self._inlined or (name != "shard_map" and has_collective(eqn))
        return super().call(eqn, inputs) if inside else self.operation(eqn, inputs)


def is_same(first: Op, second: Op) -> bool:
    """Whether two operations give equal results for equal operands."""
    return (
        first.eqn.primitive is second.eqn.primitive
        and _has_same_operands_and_results(first.eqn, second.eqn)
        and _has_same_params(first.eqn.params, second.eqn.params)
    )


def _has_same_operands_and_results(first: Any, second: Any) -> bool:
    """Whether the operands and results of two equations have the same shapes and dtypes."""
    return _has_same_avals(first.invars, second.invars) and _has_same_avals(
        first.outvars, second.outvars
    )


def _has_same_avals(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype
        for a, b in zip(first, second, strict=True)
    )


def _has_same_params(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        is_equal(value, second[name])
        for name, value in first.items()
        if name not in _OF_DERIVATIVES
    )


def is_equal(first: Any, second: Any) -> bool:
    """Whether two parameters, literals or sub-programs have the same type and bits.

    See Note [Equal constants].
    """
    if first is second:
        return True
    if isinstance(first, Literal) and isinstance(second, Literal):
        return str(first.aval) == str(second.aval) and is_equal(first.val, second.val)
    if hasattr(open_jaxpr(first), "eqns"):
        return _is_same_program(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    if isinstance(first, dict):
        return is_equal(list(first.items()), list(second.items()))
    if isinstance(first, (np.ndarray, np.generic, jax.Array)):
        return has_known_bits(first) and has_known_bits(second) and same_bits((first, second))
    try:
        return bool(exact(first) == exact(second))
    except (TypeError, ValueError):
        return False


def _is_same_program(first: Any, second: Any) -> bool:
    a, b = open_jaxpr(first), open_jaxpr(second)
    if not hasattr(b, "eqns") or len(a.eqns) != len(b.eqns):
        return False
    if not _has_same_avals(a.invars, b.invars) or len(a.constvars) != len(b.constvars):
        return False
    consts = zip(getattr(first, "consts", ()), getattr(second, "consts", ()), strict=False)
    if not all(is_equal(x, y) for x, y in consts):
        return False
    mine, theirs = (*a.invars, *a.constvars), (*b.invars, *b.constvars)
    # Programs are equal up to the names of variables: map those of the first to the second.
    names: dict[Any, Any] = dict(zip(mine, theirs, strict=True))
    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or not _has_same_operands_and_results(e, f):
            return False
        if not _is_renamed(e.invars, f.invars, names) or not _has_same_params(e.params, f.params):
            return False
        names.update(zip(e.outvars, f.outvars, strict=True))
    return len(a.outvars) == len(b.outvars) and _is_renamed(a.outvars, b.outvars, names)


def _is_renamed(first: Any, second: Any, names: dict[Any, Any]) -> bool:
    return all(
        is_equal(a, b) if isinstance(a, Literal) else names.get(a) is b
        for a, b in zip(first, second, strict=True)
    )


def list_shapes(column: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shape of a column in each group; groups without a value get that of another."""
    known = [None if a is None else tuple(jnp.shape(abstract(a))) for a in column]
    some = next(s for s in known if s is not None)
    return tuple(some if s is None else s for s in known)


def slice_to(value: Any, shape: tuple[int, ...]) -> Any:
    """Return the part of `value` at the start of each dim that has this shape."""
    if value.shape == shape:
        return value
    return jax.lax.slice(value, (0,) * len(shape), shape)


def find_largest(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the largest size of each dim."""
    return tuple(map(max, zip(*shapes, strict=True)))


def pad_to_largest(value: Any, column: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    """Pad `value` to the largest of `shapes` in each dim; return zeros if the value is None."""
    largest = find_largest(shapes)
    dtype = next(dtype_of(a) for a in column if a is not None)
    if value is None:
        return jnp.zeros(largest, dtype)
    return pad_to_shape(jnp.asarray(value), largest)


def pad_to_shape(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pad `value` with zeros at the end of each dim."""
    if value.shape == shape:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # JAX traces a pad of random keys, but cannot lower it: pad their data instead.
        words = jax.random.key_data(value)
        whole = pad_to_shape(words, (*shape, *words.shape[value.ndim :]))
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(value))
    widths = [(0, n - have, 0) for n, have in zip(shape, value.shape, strict=True)]
    return jax.lax.pad(value, jnp.zeros((), value.dtype), widths)


def split_by_results(
    ops: Sequence[Op], is_common: Callable[[list[Op]], bool]
) -> tuple[list[Op], list[Op | None]] | None:
    """Split an operation of all groups into a part that all groups share, and the rest.

    A call, a loop or a branch may compute a count that is equal on all replicas beside a sum over
    the rows of a replica.

    Args:
        ops: The operation of each group. Together they are not common.
        is_common: Whether operations of all groups have equal results.

    Returns:
        For each group the common part, and the other one if results are left; None if no result is
        common.
    """
    first = ops[0]
    count = len(first.outputs)
    if count < 2 or any(len(op.outputs) != count for op in ops):
        return None
    found: set[int] = set()
    for n in range(count):
        if n not in found:
            part = _take_all(ops, [n])
            if part is not None and is_common([op for op, _ in part]):
                found.update(part[0][1])
    common = _take_all(ops, found) if found else None
    if common is None or not is_common([op for op, _ in common]):
        return None
    # Operands that no result needs may differ, so all results can be common.
    rest = {*range(count)} - found
    others = _take_all(ops, rest) if rest else []
    if others is None:
        return None
    left: list[Op | None] = [_with_fresh(op, numbers, found) for op, numbers in others]
    return [op for op, _ in common], left or [None] * len(ops)


def _take_all(ops: Sequence[Op], numbers: Collection[int]) -> list[tuple[Op, list[int]]] | None:
    """Return the operations with some of their results, and the numbers of these."""
    parts = [_take(op, numbers) for op in ops]
    found = [part for part in parts if part is not None]
    alike = len(found) == len(parts) and all(n == found[0][1] for _, n in found)
    return found if alike else None


def _take(op: Op, numbers: Collection[int]) -> tuple[Op, list[int]] | None:
    made = _compat.drop_results(op.eqn, numbers)
    if made is None:
        return None
    eqn, operands, results = made
    inputs = tuple(op.inputs[n] for n in operands)
    return Op(eqn, inputs, tuple(op.outputs[n] for n in results), op.has_collective), results


def _with_fresh(op: Op, numbers: Sequence[int], taken: Collection[int]) -> Op:
    """Return an operation with new keys for those results that the common part also computes."""
    outputs = (Key(k.aval) if n in taken else k for n, k in zip(numbers, op.outputs, strict=True))
    return Op(op.eqn, op.inputs, tuple(outputs), op.has_collective)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The group of each replica."""

    of_replica: tuple[int, ...]
    axes: AxisNames

    @property
    def count(self) -> int:
        """The number of groups."""
        return max(self.of_replica) + 1

    def members(self, group: int) -> list[int]:
        """Return the replicas of one group."""
        return [r for r, g in enumerate(self.of_replica) if g == group]

    def describe(self, texts: Sequence[str]) -> str:
        """Return one line for each group: the numbers of its replicas, and its text."""
        return "\n".join(f"replicas {self.members(g)}: {text}" for g, text in enumerate(texts))

    def get_own_group(self) -> Any:
        """Return the group of the current replica, traced."""
        return jnp.asarray(self.of_replica, jnp.int32)[jax.lax.axis_index(self.axes)]
