"""Which values of a random step are the same on all replicas, by what the instructions mean."""

from collections.abc import Sequence
from typing import Any

from tests.program.oracle.numpy_collectives import COLLECTIVE
from tests.program.oracle.numpy_state import NNX, VARIABLES


def equal_values(ops: Sequence[Any], pool: Sequence[bool], *, uneven: bool = False) -> list[bool]:
    """For each value of the pool, whether it has to be recognized as equal.

    In an `uneven` step groups of replicas do control flow with rows in it, each its own.
    """
    found = list(pool)
    for op in ops:
        x, y = (found[i] for i in op.operands)
        is_equal = _is_equal(op, x, y)
        found.append(is_equal and not (uneven and _has_rows_inside(op)))
    return found


def _is_equal(op: Any, x: bool, y: bool) -> bool:
    def block(x: bool, y: bool, number: int = 0) -> bool:
        return equal_values(op.blocks[number], [x, y])[-1]

    def carried() -> bool:
        # A carry is equal if it starts equal and no turn changes that.
        return x and block(True, y)

    match op.kind:
        case "local":
            return x
        case "two":
            return x and y
        case "rows":
            return False
        case "collective":
            return COLLECTIVE[op.name].is_equal
        case "variable":
            return VARIABLES[op.name].is_equal
        case "nnx":
            return x and NNX[op.name].keeps_equal
        case "jit" | "remat":
            return block(x, y)
        case "vmap":
            return block(x and y, y)
        case "grad":
            return x and y and all(_stays_equal(inner) for b in op.blocks for inner in b)
        case "cond" | "own cond":
            return x and y and block(x, y)
        case "switch" | "own switch":
            return x and y and block(x, y) and block(y, x, 1)
        case "own fori" | "own while":
            return y and carried()
        case "fori" | "fori dynamic" | "while" | "until" | "scan" | "scan back":
            return carried()
    raise NotImplementedError(op.kind)


def _stays_equal(op: Any) -> bool:
    """Whether gradients of equal values are equal."""
    collectives = [o for o, _ in op.walk() if o.kind == "collective"]
    return all(COLLECTIVE[o.name].is_equal and COLLECTIVE[o.name].keeps_equal for o in collectives)


def _has_rows_inside(op: Any) -> bool:
    inside = [inner for block in op.blocks for o in block for inner, _ in o.walk()]
    return any("rows" in (o.kind, *o.name.split()) for o in inside)
