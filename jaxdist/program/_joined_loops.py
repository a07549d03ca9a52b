"""Loops and branches of several traces that hold collectives, as one loop or branch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxdist import _compat
from jaxdist.program._joined_ops import Op, Slot

# Evaluates one program for each group, together.
Run: TypeAlias = Callable[[Sequence[Any], list[Slot]], list[Slot]]


def same_length(ops: Sequence[Op]) -> bool:
    """Whether loops that count their turns count the same."""
    return len({op.eqn.params.get("length") for op in ops}) == 1


def same_branches(ops: Sequence[Op]) -> bool:
    """Whether conditionals have as many branches."""
    return len({len(op.eqn.params.get("branches", ())) for op in ops}) == 1


def _scan(ops: list[Op], slots: list[Slot], run: Run) -> list[Slot]:
    params = ops[0].eqn.params
    consts, carry = _compat.scan_counts(params)
    inner = [op.eqn.params["jaxpr"] for op in ops]
    held, start, rows = slots[:consts], slots[consts : consts + carry], slots[consts + carry :]
    row_shapes = [tuple(s[1:] for s in slot.shapes) for slot in rows]
    out_shapes: list[Any] = []

    def body(state: list[Any], values: list[Any]) -> Any:
        each = (Slot(v, shapes) for v, shapes in zip(values, row_shapes, strict=True))
        outputs = run(inner, [*held, *_like(state, start), *each])
        out_shapes[:] = [s.shapes for s in outputs]
        return [s.value for s in outputs[:carry]], [s.value for s in outputs[carry:]]

    state, stacked = jax.lax.scan(
        body,
        [s.value for s in start],
        [s.value for s in rows],
        length=params["length"],
        reverse=params["reverse"],
    )
    stacked_shapes = [tuple((params["length"], *s) for s in o) for o in out_shapes[carry:]]
    pairs = zip(stacked, stacked_shapes, strict=True)
    return [*_like(state, start), *(Slot(v, shapes) for v, shapes in pairs)]


def _cond(ops: list[Op], slots: list[Slot], run: Run) -> list[Slot]:
    index, *operands = slots
    shapes: list[Any] = []

    def of(number: int) -> Callable[[list[Any]], list[Any]]:
        def branch(values: list[Any]) -> list[Any]:
            inner = [op.eqn.params["branches"][number] for op in ops]
            outputs = run(inner, _like(values, operands))
            shapes[:] = [s.shapes for s in outputs]
            return [s.value for s in outputs]

        return branch

    branches = [of(i) for i in range(len(ops[0].eqn.params["branches"]))]
    values = jax.lax.switch(index.value, branches, [s.value for s in operands])
    return [Slot(v, s) for v, s in zip(values, shapes, strict=True)]


def _while(ops: list[Op], slots: list[Slot], run: Run) -> list[Slot]:
    params = ops[0].eqn.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, start = slots[: split[0]], slots[split[0] : split[1]], slots[split[1] :]

    def goes_on(state: list[Any]) -> Any:
        inner = [op.eqn.params["cond_jaxpr"] for op in ops]
        return run(inner, [*of_cond, *_like(state, start)])[0].value

    def body(state: list[Any]) -> list[Any]:
        inner = [op.eqn.params["body_jaxpr"] for op in ops]
        return [s.value for s in run(inner, [*of_body, *_like(state, start)])]

    return _like(jax.lax.while_loop(goes_on, body, [s.value for s in start]), start)


def _like(values: Sequence[Any], slots: Sequence[Slot]) -> list[Slot]:
    return [Slot(v, s.shapes) for v, s in zip(values, slots, strict=True)]


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
