"""Loops and branches with collectives of several traces, joined into one loop or branch.

See Note [Joined traces].
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxdist import _compat
from jaxdist._program.jaxprs.batched_while import has_active_row, keep_finished_rows
from jaxdist._program.uneven.joined_ops import Op, Slot

# Evaluates one program for each group, joined, on the operands of each group.
Run: TypeAlias = Callable[[Sequence[Any], Sequence[Sequence[Slot]]], list[Slot]]
Operands: TypeAlias = Sequence[Sequence[Slot]]  # by group


def list_constants(op: Op) -> range:
    """Return the positions of the constants of a loop or branch; none for other operations."""
    params = op.eqn.params
    if op.name == "scan":
        return range(_compat.get_scan_counts(params)[0])
    if op.name == "while":
        return range(params["cond_nconsts"] + params["body_nconsts"])
    return range(1, len(op.inputs)) if op.name == "cond" else range(0)


def has_same_length(ops: Sequence[Op]) -> bool:
    """Whether all scans have the same length; true for other operations."""
    return len({op.eqn.params.get("length") for op in ops}) == 1


def has_same_branches(ops: Sequence[Op]) -> bool:
    """Whether all conditionals have the same number of branches."""
    return len({len(op.eqn.params.get("branches", ())) for op in ops}) == 1


def describe_loop(op: Op) -> str:
    """Describe what must be equal in the loops and branches of all groups."""
    others = len(op.inputs) - len(list_constants(op))
    if op.name == "cond":
        return f"{len(op.outputs)} results"
    if op.name == "while":
        return f"{others} values carried"
    carry = _compat.get_scan_counts(op.eqn.params)[1]
    way = "backwards" if op.eqn.params["reverse"] else "forwards"
    return (
        f"{carry} values carried, {others - carry} read by turns, "
        f"{len(op.outputs) - carry} collected, {way}"
    )


def _scan(ops: list[Op], operands: Operands, run: Run) -> list[Slot]:
    params = ops[0].eqn.params
    carry = _compat.get_scan_counts(params)[1]
    inner = [op.eqn.params["jaxpr"] for op in ops]
    consts = [given[: len(list_constants(op))] for op, given in zip(ops, operands, strict=True)]
    others = operands[0][len(consts[0]) :]
    start, rows = others[:carry], others[carry:]
    row_shapes = [tuple(s[1:] for s in slot.shapes) for slot in rows]
    # Filled while JAX traces the body: only then the shapes of each group are known.
    out_shapes: list[Any] = []

    def body(state: list[Any], values: list[Any]) -> Any:
        each = [Slot(v, shapes) for v, shapes in zip(values, row_shapes, strict=True)]
        outputs = run(inner, _make_operands(consts, [*state, *values], [*start, *each]))
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
    return [*_make_slots(state, start), *(Slot(v, shapes) for v, shapes in pairs)]


def _cond(ops: list[Op], operands: Operands, run: Run) -> list[Slot]:
    index = operands[0][0]
    shapes: list[Any] = []

    def make_branch(number: int) -> Callable[[], list[Any]]:
        def branch() -> list[Any]:
            inner = [op.eqn.params["branches"][number] for op in ops]
            outputs = run(inner, [given[1:] for given in operands])
            shapes[:] = [s.shapes for s in outputs]
            return [s.value for s in outputs]

        return branch

    branches = [make_branch(i) for i in range(len(ops[0].eqn.params["branches"]))]
    values = jax.lax.switch(index.value, branches)
    return [Slot(v, s) for v, s in zip(values, shapes, strict=True)]


def _while(ops: list[Op], operands: Operands, run: Run) -> list[Slot]:
    start = operands[0][len(list_constants(ops[0])) :]
    by_group = list(zip(ops, operands, strict=True))

    def condition(state: list[Any]) -> Any:
        inner = [op.eqn.params["cond_jaxpr"] for op in ops]
        consts = [given[: op.eqn.params["cond_nconsts"]] for op, given in by_group]
        return run(inner, _make_operands(consts, state, start))[0].value

    is_batched = bool(ops[0].eqn.params["cond_jaxpr"].out_avals[0].shape)

    def body(state: list[Any]) -> list[Any]:
        inner = [op.eqn.params["body_jaxpr"] for op in ops]
        consts = [
            given[op.eqn.params["cond_nconsts"] : len(list_constants(op))] for op, given in by_group
        ]
        after = [s.value for s in run(inner, _make_operands(consts, state, start))]
        # Under `vmap`, rows whose condition is False keep their state.
        return keep_finished_rows(condition(state), after, state) if is_batched else after

    last = jax.lax.while_loop(
        lambda state: has_active_row(condition(state)), body, [s.value for s in start]
    )
    return _make_slots(last, start)


def _make_operands(
    consts: Operands, values: Sequence[Any], slots: Sequence[Slot]
) -> list[list[Slot]]:
    """Return the operands of each group: its own constants, then slots that all groups share."""
    # The slots must be identical, not only equal: `_Join` compares them by identity.
    common = _make_slots(values, slots)
    return [[*own, *common] for own in consts]


def _make_slots(values: Sequence[Any], slots: Sequence[Slot]) -> list[Slot]:
    return [Slot(v, s.shapes) for v, s in zip(values, slots, strict=True)]


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
