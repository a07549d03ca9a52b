"""The results of one operation that are the same in all groups, apart from its other results."""

from collections.abc import Callable, Collection, Sequence

from jaxdist import _compat
from jaxdist._program.uneven.joined_ops import Key, Op


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
