"""Rules for operations whose result on the rows of a replica is those rows of the full result.

A rule compares one operation of a program that is traced for the rows of one replica with the same
operation in the program of all rows. It decides whether the replica may run its own operation. If
no rule applies, the replicas gather the rows: that is slower, and right for every operation.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist._keras.forward.aligned import is_same_parameter
from jaxdist._program import primitives as known


class Kind(enum.Enum):
    """How the value of a replica relates to the value in the program of all rows."""

    WHOLE = "whole"  # it is this value
    ROWS = "rows"  # it has the replica's rows of this value, along one dim
    PART = "part"  # the sum over the replicas is this value
    OWN = "own"  # each replica has its own value, and Keras alone would have another one


@dataclasses.dataclass(frozen=True)
class Fact:
    """How the value of a replica relates to the value in the program of all rows."""

    kind: Kind
    dim: int = -1  # of the rows


WHOLE, PART, OWN = Fact(Kind.WHOLE), Fact(Kind.PART), Fact(Kind.OWN)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The numbers of rows in the two programs: of one replica, and of all."""

    own: int
    total: int

    def find_dim(self, own: Sequence[int], whole: Sequence[int]) -> int | None:
        """Return the dim of the rows; -1 if the shapes are equal, None if it is unclear."""
        if len(own) != len(whole):
            return None
        places = [n for n, (a, b) in enumerate(zip(own, whole, strict=True)) if a != b]
        if not places:
            return -1
        if len(places) > 1:
            return None
        [n] = places
        # Whole blocks of rows. With other sizes, the value does not have one block for each row.
        fits = own[n] % self.own == 0 and own[n] // self.own * self.total == whole[n]
        return n if fits else None


def _same(eqn: Any, other: Any, *but: str) -> bool:
    keys = [k for k in eqn.params if k not in but]
    return all(is_same_parameter(eqn.params[k], other.params.get(k)) for k in keys)


# Each element of the result depends on the elements at the same position in the operands.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne neg nextafter not or polygamma population_count pow real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta
    """.split()
)
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
    | {"reduce_xor", "argmax", "argmin"}
)
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_WINDOWS = frozenset({"reduce_window_sum", "reduce_window_max", "reduce_window_min"})


def find_fact(eqn: Any, other: Any, facts: list[Fact], sizes: Sizes) -> Fact | None:
    """Return the fact of the results of the own operation on own operands; None if unknown.

    Args:
        eqn: The operation for the rows of one replica.
        other: The same operation in the program of all rows.
        facts: The facts of its operands: rows, values of each replica, and whole values that have
            the same shape in both programs.
        sizes: The rows of the two programs.
    """
    name = eqn.primitive.name
    dims = {f.dim for f in facts if f.kind is Kind.ROWS}
    if not dims:
        return _find_own(eqn, other, name, facts, sizes)
    fact = _find_rows(eqn, other, name, facts, dims)
    if fact is None or fact.kind is not Kind.ROWS:
        return fact
    # The shapes of all results must agree with the rule.
    pairs = zip(eqn.outvars, other.outvars, strict=True)
    found = {sizes.find_dim(a.aval.shape, b.aval.shape) for a, b in pairs}
    return fact if found == {fact.dim} else None


def _find_own(eqn: Any, other: Any, name: str, facts: list[Fact], sizes: Sizes) -> Fact | None:
    """Return the fact of an operation whose operands have no rows."""
    pairs = list(zip(eqn.outvars, other.outvars, strict=True))
    found = {sizes.find_dim(a.aval.shape, b.aval.shape) for a, b in pairs}
    dim = found.pop() if len(found) == 1 else None
    if dim is None:
        return None
    is_own = OWN in facts
    if dim == -1:
        return OWN if is_own and name in known.FIRST_ORDER and _same(eqn, other) else None
    # A value that is repeated for each row, or random numbers from a key of the replica.
    if name == "broadcast_in_dim":
        is_new = dim not in eqn.params["broadcast_dimensions"]
        size = 0
        if not is_new:
            size = eqn.invars[0].aval.shape[eqn.params["broadcast_dimensions"].index(dim)]
        is_one_value = is_new or size == 1
        fits = is_one_value and _same(eqn, other, "shape")
        return Fact(Kind.ROWS, dim) if fits else None
    if name == "random_bits" and is_own:
        return Fact(Kind.ROWS, dim) if _same(eqn, other, "shape") else None
    return None


def _find_rows(eqn: Any, other: Any, name: str, facts: list[Fact], dims: set[int]) -> Fact | None:
    if name == "dot_general":
        return _dot(eqn, other, facts) if _same(eqn, other, "out_sharding") else None
    if name == "gather":
        return _gather(eqn, other, facts)
    if len(dims) > 1:
        return None
    [dim] = dims
    ndim = len(eqn.outvars[0].aval.shape)
    rows = Fact(Kind.ROWS, dim)
    if name in ELEMENTWISE or name in known.PAIRWISE:
        # JAX requires operands of equal rank here; a scalar is used for every value.
        fits = all(len(v.aval.shape) in (0, ndim) for v in eqn.invars)
        return rows if fits and _same(eqn, other, "sharding") else None
    if name in _REDUCTIONS:
        return _reduce(eqn, other, name, dim)
    simple = _RULES.get(name)
    if simple is not None:
        return simple(eqn, other, dim)
    if name == "conv_general_dilated":
        return _convolve(eqn, other, facts, dim)
    if name == "dynamic_slice":
        sizes = eqn.params["slice_sizes"]
        fits = facts[0] == rows and sizes[dim] == eqn.invars[0].aval.shape[dim]
        return rows if fits and all(f.kind is Kind.WHOLE for f in facts[1:]) else None
    return rows if _keeps_rows(eqn, name, facts, rows) and _same(eqn, other) else None


def _keeps_rows(eqn: Any, name: str, facts: list[Fact], rows: Fact) -> bool:
    """Whether an operation works on each row by itself, and leaves the rows where they are."""
    params, dim = eqn.params, rows.dim
    if name in _CUMULATIVE:
        return bool(params["axis"] != dim)
    if name in _WINDOWS:
        return _is_window_of_one(params, dim)
    if name in ("concatenate", "sort"):
        return all(f == rows for f in facts) and params["dimension"] != dim
    if name == "pad":
        return facts[1].kind is Kind.WHOLE and params["padding_config"][dim] == (0, 0, 0)
    if name == "rev":
        return dim not in params["dimensions"]
    if name == "top_k":
        ndim = len(eqn.invars[0].aval.shape)
        return bool(params.get("axis", ndim - 1) % ndim != dim)
    return False


def _reduce(eqn: Any, other: Any, name: str, dim: int) -> Fact | None:
    axes = eqn.params["axes"]
    if not _same(eqn, other, "out_sharding"):
        return None
    if dim in axes:
        return PART if name == "reduce_sum" else None
    return Fact(Kind.ROWS, dim - sum(a < dim for a in axes))


def _broadcast(eqn: Any, other: Any, dim: int) -> Fact | None:
    place = eqn.params["broadcast_dimensions"][dim]
    return Fact(Kind.ROWS, place) if _same(eqn, other, "shape", "sharding") else None


def _reshape(eqn: Any, other: Any, dim: int) -> Fact | None:
    own, whole = eqn.params["new_sizes"], other.params["new_sizes"]
    if eqn.params.get("dimensions") is not None:
        return None
    places = [n for n, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b]
    if len(own) != len(whole) or len(places) != 1:
        return None
    # The rows are one block of the array, at the same position before and after.
    before = math.prod(eqn.invars[0].aval.shape[:dim])
    fits = math.prod(own[: places[0]]) == before
    return Fact(Kind.ROWS, places[0]) if fits else None


def _squeeze(eqn: Any, other: Any, dim: int) -> Fact | None:
    gone = eqn.params["dimensions"]
    fits = dim not in gone and _same(eqn, other)
    return Fact(Kind.ROWS, dim - sum(a < dim for a in gone)) if fits else None


def _transpose(eqn: Any, other: Any, dim: int) -> Fact | None:
    order = eqn.params["permutation"]
    return Fact(Kind.ROWS, order.index(dim)) if _same(eqn, other) else None


def _slice(eqn: Any, other: Any, dim: int) -> Fact | None:
    p, q = eqn.params, other.params
    strides = p["strides"] or (1,) * len(p["start_indices"])
    is_all = p["start_indices"][dim] == 0 and strides[dim] == 1
    is_all = is_all and p["limit_indices"][dim] == eqn.invars[0].aval.shape[dim]
    is_all = is_all and q["limit_indices"][dim] == other.invars[0].aval.shape[dim]
    rest = [b for n, b in enumerate(p["limit_indices"]) if n != dim]
    is_same = rest == [b for n, b in enumerate(q["limit_indices"]) if n != dim]
    return (
        Fact(Kind.ROWS, dim) if is_all and is_same and _same(eqn, other, "limit_indices") else None
    )


_RULES: dict[str, Callable[[Any, Any, int], Fact | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _slice,
}


def _is_window_of_one(params: Any, dim: int) -> bool:
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return all(params[k][dim] == 1 for k in ones) and tuple(params["padding"][dim]) == (0, 0)


def _convolve(eqn: Any, other: Any, facts: list[Fact], dim: int) -> Fact | None:
    numbers = eqn.params["dimension_numbers"]
    fits = facts[0].kind is Kind.ROWS and facts[1].kind is Kind.WHOLE
    fits = fits and numbers.lhs_spec[0] == dim and eqn.params["batch_group_count"] == 1
    return Fact(Kind.ROWS, numbers.out_spec[0]) if fits and _same(eqn, other) else None


def _dot(eqn: Any, other: Any, facts: list[Fact]) -> Fact | None:
    (left, right), (of_left, of_right) = eqn.params["dimension_numbers"]
    first, second = facts
    dims = [len(v.aval.shape) for v in eqn.invars]
    free_left = [n for n in range(dims[0]) if n not in left and n not in of_left]
    free_right = [n for n in range(dims[1]) if n not in right and n not in of_right]
    if Kind.ROWS is first.kind is second.kind:
        pairs = list(zip(left, right, strict=True))
        if (first.dim, second.dim) in pairs:
            return PART
        batch = list(zip(of_left, of_right, strict=True))
        pair = (first.dim, second.dim)
        return Fact(Kind.ROWS, batch.index(pair)) if pair in batch else None
    if first.kind is Kind.ROWS:
        if first.dim not in free_left:
            return None
        return Fact(Kind.ROWS, len(of_left) + free_left.index(first.dim))
    if second.dim not in free_right:
        return None
    place = len(of_left) + len(free_left) + free_right.index(second.dim)
    return Fact(Kind.ROWS, place)


def _gather(eqn: Any, other: Any, facts: list[Fact]) -> Fact | None:
    array, indices = facts
    p = eqn.params
    numbers, ndim = p["dimension_numbers"], len(eqn.outvars[0].aval.shape)
    batch = [n for n in range(ndim) if n not in numbers.offset_dims]
    pairs = list(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    last = len(eqn.invars[1].aval.shape) - 1
    if indices.kind is Kind.ROWS and indices.dim != last:
        is_looked_up = array.kind is Kind.WHOLE and indices.dim not in dict(pairs).values()
        is_paired = array.kind is Kind.ROWS and (array.dim, indices.dim) in pairs
        if (is_looked_up or is_paired) and _same(eqn, other):
            return Fact(Kind.ROWS, batch[indices.dim])
        return None
    if array.kind is not Kind.ROWS or indices.kind is not Kind.WHOLE:
        return None
    # The same columns for each row.
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    shape, wide = eqn.invars[0].aval.shape, other.invars[0].aval.shape
    sizes, others = p["slice_sizes"], other.params["slice_sizes"]
    is_all = sizes[array.dim] == shape[array.dim] and others[array.dim] == wide[array.dim]
    rest = [n for n in range(len(sizes)) if n != array.dim]
    is_same = all(sizes[n] == others[n] for n in rest) and _same(eqn, other, "slice_sizes")
    if not is_all or not is_same or array.dim in gone or array.dim in numbers.start_index_map:
        return None
    left = [n for n in range(len(shape)) if n not in gone]
    return Fact(Kind.ROWS, numbers.offset_dims[left.index(array.dim)])
