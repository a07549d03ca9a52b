"""Operations that move, take or sum elements along dims that are not cut.

Such an operation on the piece of a replica gives the piece of its result. This file says, for each
operation, how the result is cut, and with which sizes it runs on the piece. The dim of the pieces
must stay as it is; XLA follows the dims that are split over the logical devices. See Note [Whole
shapes, local pieces] in pieces.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxdist._values import Cut


class Moved(NamedTuple):
    """The result of an operation on pieces.

    Attributes:
        cut: How the result is cut; None if the operation changes the dim that is cut.
        params: The parameters of the operation on the piece.
    """

    cut: Cut | None
    params: dict[str, Any]


# A rule gets the cut of the operands, the parameters, the shape of the first operand as a whole,
# and the length of a piece.
_Rule = Callable[[Cut, dict[str, Any], tuple[int, ...], int], Moved]


def follow(eqn: Any, cut: Cut, rows: int) -> Moved:
    """Apply the rule of an operation whose operands are pieces that are cut alike.

    Args:
        eqn: The operation, in whole shapes.
        cut: How its operands are cut.
        rows: The length of one piece along the dim that is cut.
    """
    first, *others = (tuple(v.aval.shape) for v in eqn.invars[: count_arrays(eqn)])
    if any(s[cut.dim] != cut.size for s in (first, *others)):
        return Moved(None, eqn.params)
    return _RULES[eqn.primitive.name](cut, eqn.params, first, rows)


def has_rule(eqn: Any) -> bool:
    """Whether an operation may move pieces along dims that are not cut."""
    return eqn.primitive.name in _RULES


def count_arrays(eqn: Any) -> int:
    """Return how many of the operands are arrays; those after them are indices."""
    return _ARRAYS.get(eqn.primitive.name, len(eqn.invars))


_ARRAYS = {"dynamic_slice": 1, "dynamic_update_slice": 2, "pad": 1}


def _with_rows(sizes: Sequence[int], cut: Cut, rows: int) -> tuple[int, ...]:
    return (*sizes[: cut.dim], rows, *sizes[cut.dim + 1 :])


def _without(cut: Cut, params: dict[str, Any], removed: Sequence[int]) -> Moved:
    if cut.dim in removed:
        return Moved(None, params)
    for dim in sorted(removed, reverse=True):
        cut = cut.before(dim)
    return Moved(cut, params)


def _slice(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    start, limit = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(shape)
    if (start[cut.dim], limit[cut.dim], strides[cut.dim]) != (0, shape[cut.dim], 1):
        return Moved(None, params)
    return Moved(cut, {**params, "limit_indices": _with_rows(limit, cut, rows)})


def _dynamic_slice(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    # A slice of the whole length starts at 0, whatever its index is: JAX clamps it.
    sizes = params["slice_sizes"]
    if sizes[cut.dim] != shape[cut.dim]:
        return Moved(None, params)
    return Moved(cut, {**params, "slice_sizes": _with_rows(sizes, cut, rows)})


def _unchanged(dims: Callable[[dict[str, Any]], Sequence[int]]) -> _Rule:
    """Return the rule of an operation over some dims, which stay."""

    def rule(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
        over = {d % len(shape) for d in dims(params)}
        return Moved(None if cut.dim in over else cut, params)

    return rule


def _removed(dims: Callable[[dict[str, Any]], Sequence[int]]) -> _Rule:
    """Return the rule of an operation that removes some dims."""

    def rule(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
        return _without(cut, params, [d % len(shape) for d in dims(params)])

    return rule


def _pad(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    widths = params["padding_config"]
    return Moved(cut if tuple(widths[cut.dim]) == (0, 0, 0) else None, params)


def _broadcast(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    wide, places = params["shape"], params["broadcast_dimensions"]
    sharding = params.get("sharding")
    is_placed = sharding is not None and any(s is not None for s in sharding.spec)
    if is_placed or wide[places[cut.dim]] != shape[cut.dim]:
        return Moved(None, params)
    moved = cut._replace(dim=places[cut.dim])
    return Moved(moved, {**params, "shape": _with_rows(wide, moved, rows)})


def _transpose(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    order = list(params["permutation"])
    return Moved(cut._replace(dim=order.index(cut.dim)), params)


def _reshape(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    sizes = params["new_sizes"]

    # The dim stays as it is if as many elements come before it, in the order of rows.
    before = math.prod(shape[: cut.dim])
    found = [d for d, n in enumerate(sizes) if (math.prod(sizes[:d]), n) == (before, cut.size)]
    if params.get("dimensions") is not None or len(found) != 1:
        return Moved(None, params)
    moved = cut._replace(dim=found[0])
    return Moved(moved, {**params, "new_sizes": _with_rows(sizes, moved, rows)})


def _stack(cut: Cut, params: dict[str, Any], shape: tuple[int, ...], rows: int) -> Moved:
    return Moved(cut.insert_dim(params["axis"] % (len(shape) + 1)), params)


_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REDUCTIONS, _removed(lambda params: params["axes"])),
    "squeeze": _removed(lambda params: params["dimensions"]),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    # `follow` has found that the update is as long as the array, so it starts at 0.
    "dynamic_update_slice": _unchanged(lambda _: ()),
    "pad": _pad,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "unstack": _removed(lambda params: [params["axis"]]),
    "stack": _stack,
    "split": _unchanged(lambda params: [params["axis"]]),
    "concatenate": _unchanged(lambda params: [params["dimension"]]),
    "rev": _unchanged(lambda params: params["dimensions"]),
}
