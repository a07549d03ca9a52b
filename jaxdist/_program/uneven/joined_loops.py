"""Loops and branches with collectives of several traces, joined into one loop or branch.

See Note [Joined traces].
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxdist._program.jaxprs.control_flow import Scan, While, run_while
from jaxdist._program.uneven.joined_ops import Op, Slot

# Evaluates one program for each group, joined, on the operands of each group.
Run: TypeAlias = Callable[[Sequence[Any], Sequence[Sequence[Slot]]], list[Slot]]
Operands: TypeAlias = Sequence[Sequence[Slot]]  # by group


def list_constants(op: Op) -> range:
    """Return the positions of the constants of a loop or branch; none for other operations."""
    if op.name == "scan":
        return range(Scan.of(op.eqn.params).num_consts)
    if op.name == "while":
        loop = While.of(op.eqn.params)
        return range(loop.num_condition_consts + loop.num_body_consts)
    return range(1, len(op.inputs)) if op.name == "cond" else range(0)


def _scan(ops: list[Op], operands: Operands, run: Run) -> list[Slot]:
    loops = [Scan.of(op.eqn.params) for op in ops]
    length, carry = loops[0].length, loops[0].num_carry
    consts = [loop.split(given)[0] for loop, given in zip(loops, operands, strict=True)]
    _, start, rows = loops[0].split(operands[0])
    row_shapes = [tuple(s[1:] for s in slot.shapes) for slot in rows]
    # Filled while JAX traces the body: only then are the shapes of each group known.
    out_shapes: list[Any] = []

    def body(state: list[Any], values: list[Any]) -> Any:
        each = [Slot(v, shapes) for v, shapes in zip(values, row_shapes, strict=True)]
        outputs = run(
            [x.program for x in loops], _make_operands(consts, [*state, *values], [*start, *each])
        )
        out_shapes[:] = [s.shapes for s in outputs]
        return [s.value for s in outputs[:carry]], [s.value for s in outputs[carry:]]

    state, stacked = jax.lax.scan(
        body,
        [s.value for s in start],
        [s.value for s in rows],
        length=length,
        reverse=ops[0].eqn.params["reverse"],
    )
    stacked_shapes = [tuple((length, *s) for s in o) for o in out_shapes[carry:]]
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
    loops = [While.of(op.eqn.params) for op in ops]
    parts = [loop.split(given) for loop, given in zip(loops, operands, strict=True)]
    start = parts[0][2]

    def condition(state: list[Any]) -> Any:
        given = _make_operands([of_condition for of_condition, _, _ in parts], state, start)
        return run([loop.condition for loop in loops], given)[0].value

    def body(state: list[Any]) -> list[Any]:
        given = _make_operands([of_body for _, of_body, _ in parts], state, start)
        return [s.value for s in run([loop.body for loop in loops], given)]

    values = [s.value for s in start]
    last = run_while(condition, body, values, is_batched=loops[0].is_batched)
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
