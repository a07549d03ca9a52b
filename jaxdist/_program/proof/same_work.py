"""Proof that every replica of a step does the same work.

This holds if no value that differs between replicas reaches a result. A sum of such values over
the replicas counts as one that differs: the replicas shared the work before it.
"""

from collections.abc import Collection, Sequence
from typing import Any

from jaxdist import _compat
from jaxdist._collectives import ASSUME_REPLICATED, REQUIRE_REPLICATED
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._values import OPEN, PIECE

# A fact is a set of bits: the value depends on something that differs between replicas; it is this
# replica's piece of one array; and, from the third bit on, it depends on an input.
_DIFFERS = 1
_IS_PIECE = 2
_FIRST_INPUT = 4

# Primitives of jaxdist that return their operands.
_MARKS = frozenset({ASSUME_REPLICATED, REQUIRE_REPLICATED})

# The folders of the package that cut arrays into pieces: FSDP and sharded updates.
_CUTTING = ("_values/sharded/", "_update/")

# With a piece as operand, these are work that the replicas share.
_SHARED_WORK = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


def find_same_work(
    jaxpr: Any,
    differs: Sequence[bool],
    is_cut: Sequence[bool],
    cut_results: Collection[int],
    axes: frozenset[str],
) -> frozenset[int]:
    """Return the inputs that reach a result of a step in which every replica does the same work.

    Args:
        jaxpr: The open program of one replica.
        differs: For each input, whether each replica has its own value.
        is_cut: For each input, whether each replica has a piece of one array.
        cut_results: The numbers of the results that are in pieces, one on each replica.
        axes: The replica axes.

    Returns:
        The numbers of inputs; none if the replicas do different work.
    """
    analysis = SameWorkAnalysis(axes)
    given = [
        _IS_PIECE if cut else _DIFFERS if own else _FIRST_INPUT << i
        for i, (own, cut) in enumerate(zip(differs, is_cut, strict=True))
    ]
    results = analysis.run(jaxpr, given)
    analysis.note_reads(jaxpr.invars, given)
    reached = analysis.effects
    for number, fact in enumerate(results):
        is_own_piece = fact & _IS_PIECE and number not in cut_results
        reached |= fact | (_DIFFERS if is_own_piece else 0)
    if reached & _DIFFERS:
        return frozenset()
    return frozenset(i for i in range(len(given)) if reached & (_FIRST_INPUT << i))


class SameWorkAnalysis(ForwardAnalysis[int]):
    """The analysis of which inputs, and which values that differ, reach a value."""

    of_constants = 0

    def __init__(self, axes: frozenset[str]) -> None:
        self._axes = axes
        # The operands of operations with effects, such as printing, and what Python has read.
        self.effects = 0

    def note_reads(self, variables: Sequence[Any], facts: Sequence[int]) -> None:
        """Note the facts of values that Python has read, in a step that runs op by op."""
        for variable, fact in zip(variables, facts, strict=True):
            if getattr(variable, "is_read", False):
                self.effects |= fact

    def equation(self, eqn: Any, inputs: list[int]) -> list[int]:
        results = super().equation(eqn, inputs)
        self.note_reads(eqn.outvars, results)
        return results

    def join(self, eqn: Any, aval: Any, first: int, second: int) -> int:
        return first | second

    def decide(self, eqn: Any, values: list[int], decided_by: int) -> list[int]:
        return [v | decided_by for v in values]

    def operation(self, eqn: Any, inputs: list[int]) -> list[int]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        joined = 0
        for fact in inputs:
            joined |= fact
        if eqn.effects:
            self.effects |= joined
        if name in known.PAIRWISE and count == len(inputs):
            return inputs
        if eqn.primitive is PIECE:
            return [joined & ~_IS_PIECE]
        if eqn.primitive is OPEN:
            return [joined | _IS_PIECE]
        if name in known.COLLECTIVES and not self._axes & {*get_named_axes(eqn.params)}:
            return [joined] * count
        if name == "axis_index":
            return [self._find_varying(eqn, joined)]
        if name in known.REPLICATING and eqn.params.get("axis_index_groups") is None:
            return [joined & ~_IS_PIECE] * count
        if name in known.VARYING or name in known.REPLICATING:
            return [self._find_varying(eqn, joined)] * count
        is_known = name in known.FIRST_ORDER or eqn.primitive in _MARKS
        is_shared = bool(joined & _IS_PIECE) and name in _SHARED_WORK
        if is_shared or not is_known or eqn.effects:
            return [joined | _DIFFERS] * count
        return [joined] * count

    def _find_varying(self, eqn: Any, joined: int) -> int:
        """Return the fact of a result that may differ on each replica."""
        if not self._axes & {*get_named_axes(eqn.params)}:
            return joined
        # Where jaxdist itself cuts an array, the replicas have done the same work for the whole of
        # it.
        is_cut = any(_compat.is_from_folder(eqn, folder) for folder in _CUTTING)
        return joined | (_IS_PIECE if is_cut else _DIFFERS)

    def call(self, eqn: Any, inputs: list[int]) -> list[int]:
        # An all-reduce of jaxdist may consist of permutes; its results are sums of its operands.
        if "plan" in eqn.params:
            return [fact & ~_IS_PIECE for fact in inputs]
        return super().call(eqn, inputs)
