"""Decides whether a value of a traced step may vary with the rows or between replicas."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._keras.forward import marks
from jaxdist._keras.forward.aligned import NotAlignedError, find_differences
from jaxdist._program import ReplicationAnalysis
from jaxdist._program import primitives as known

# Operations whose parameters may depend on the number of rows while their values do not: these
# depend on the operands only. A collective gives the rows of all replicas, and the same count.
_WITHOUT_NUMBERS = known.REPLICATING | {"reshape"}


def may_vary(
    one: tuple[Any, int], more: tuple[Any, int], own: Sequence[bool], axes: frozenset[str]
) -> bool:
    """Whether a result may depend on the rows, on their number, or on the replica.

    Args:
        one: The program of a function for some number of rows, and the number of the result.
        more: The same for another number of rows.
        own: For each input, whether it has the rows or is the number of the replica.
        axes: The replica axes.
    """
    (first, used), (second, others) = (
        _compat.drop_unused(closed, [number]) for closed, number in (one, more)
    )
    if used != others:
        return True
    try:
        differences = find_differences(first, second, shapes=False)
    except NotAlignedError:
        return True
    given = [axes if own[n] else frozenset[str]() for n in used]
    return bool(_Varies(axes, differences).run(first, given)[0])


class _Varies(ReplicationAnalysis):
    """The replication analysis, in which the number of rows differs between replicas too."""

    def __init__(self, axes: frozenset[str], differences: frozenset[int]) -> None:
        super().__init__(axes)
        self._differences = differences

    def literal(self, literal: Any) -> frozenset[str]:
        return self._of(literal)

    def constant(self, variable: Any, value: Any) -> frozenset[str]:
        return self.axes if isinstance(value, jax.core.Tracer) else self._of(variable)

    def equation(self, eqn: Any, inputs: list[frozenset[str]]) -> list[frozenset[str]]:
        results = super().equation(eqn, inputs)
        name = marks.name_of_mark(eqn)
        if name == marks.ADD_UP:
            return [frozenset[str]()] * len(results)
        if eqn.primitive.name in _WITHOUT_NUMBERS:
            return results
        own = self.axes if name == marks.OWN_STATISTICS else self._of(eqn)
        return [r | own for r in results]

    def _of(self, part: Any) -> frozenset[str]:
        return self.axes if id(part) in self._differences else frozenset()
