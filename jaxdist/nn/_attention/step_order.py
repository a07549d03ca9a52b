"""The order of positions of a step: what `split_positions` made is what `attention` reads."""

from typing import NamedTuple

from jaxdist import _compat, _replica
from jaxdist._called import name_call, refuse
from jaxdist.nn._attention.orders import check_name

CONTIGUOUS = "contiguous"


class _Noted(NamedTuple):
    """An order, and the call that used it first."""

    order: str
    call: str


def settle_order(axis: str, order: str | None) -> str:
    """Return the order of positions over an axis: `order`, or where it is None that of the step.

    The first call of a step decides, on every layout and on one device, too. So a program that
    mixes orders is refused where it is written, not on the mesh where it would be wrong.

    Raises:
        ArgumentError: There is no such order, or the step has another one.
    """
    if order is not None:
        check_name(order)
    notes = _replica.find_notes()
    if notes is None:
        return order or CONTIGUOUS
    key = (settle_order, axis)
    known = notes.get(key)
    if known is None:
        call = f"{name_call()} at {_compat.find_callers_line()}"
        known = notes[key] = _Noted(order or CONTIGUOUS, call)
    if order not in (None, known.order):
        raise refuse(
            f"order={order!r}, in a step whose order is {known.order!r} since {known.call}.",
            f"The positions of a step lie over axis={axis!r} in one order, by which masks and "
            "rotary embeddings number them.",
            f"Pass order={known.order!r} here, or order={order!r} there; attention and positions "
            "after split_positions need no order.",
        )
    return known.order
