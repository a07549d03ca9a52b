"""Loops and branches with collectives of several traces, joined into one loop or branch.

See Note [Joined traces].
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxdist._program.jaxprs.control_flow import Scan, While
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
    first = loops[0]
    consts = [loop.split(given)[0] for loop, given in zip(loops, operands, strict=True)]
    _, start, over = first.split(operands[0])
    of_start = [slot.shapes for slot in start]
    of_rows = [tuple(shape[1:] for shape in slot.shapes) for slot in over]
    # Filled while JAX traces the body: only then are the shapes of each group known.
    out_shapes: list[Any] = []

    def body(values: list[Any]) -> list[Any]:
        given = _make_operands(consts, values, [*of_start, *of_rows])
        outputs = run([x.program for x in loops], given)
        out_shapes[:] = [s.shapes for s in outputs]
        return [s.value for s in outputs]

    values = first.run(body, [s.value for s in start], [s.value for s in over])
    rows = out_shapes[first.num_carry :]
    stacked = [tuple((first.length, *shape) for shape in shapes) for shapes in rows]
    return _make_slots(values, [*of_start, *stacked])


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
    return _make_slots(jax.lax.switch(index.value, branches), shapes)


def _while(ops: list[Op], operands: Operands, run: Run) -> list[Slot]:
    loops = [While.of(op.eqn.params) for op in ops]
    parts = [loop.split(given) for loop, given in zip(loops, operands, strict=True)]
    start = parts[0][2]
    shapes = [slot.shapes for slot in start]

    def condition(state: list[Any]) -> Any:
        given = _make_operands([of_condition for of_condition, _, _ in parts], state, shapes)
        return run([loop.condition for loop in loops], given)[0].value

    def body(state: list[Any]) -> list[Any]:
        given = _make_operands([of_body for _, of_body, _ in parts], state, shapes)
        return [s.value for s in run([loop.body for loop in loops], given)]

    return _make_slots(loops[0].run(condition, body, [s.value for s in start]), shapes)


def _make_operands(
    consts: Operands, values: Sequence[Any], shapes: Sequence[Any]
) -> list[list[Slot]]:
    """Return the operands of each group: its own constants, then slots that all groups share."""
    # The slots must be identical, not only equal: `_Join` compares them by identity.
    common = _make_slots(values, shapes)
    return [[*own, *common] for own in consts]


def _make_slots(values: Sequence[Any], shapes: Sequence[Any]) -> list[Slot]:
    return [Slot(v, s) for v, s in zip(values, shapes, strict=True)]


LOOPS = {"scan": _scan, "cond": _cond, "while": _while}
