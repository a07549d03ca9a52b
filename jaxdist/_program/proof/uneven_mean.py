"""Analysis and warning of means over replicas that have different numbers of rows."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist import _compat
from jaxdist._program.arguments.retrace import user_stack_level
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis, read_number
from jaxdist._program.proof.made_of_nothing import find_line
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._values import OPEN, PIECE, next_power_of_two, share_of_mean
from jaxdist.errors import UnevenMeanWarning

_VALUE_PRESERVING = frozenset({"convert_element_type", "reshape", "squeeze", "broadcast_in_dim"})
# How an all-reduce packs several arrays, takes them apart, and adds them up hop by hop.
_KEEPS_SHARES = frozenset(
    """
    add complex concatenate copy dynamic_slice dynamic_update_slice imag pad real slice split stack
    transpose
    """.split()
)
# A gradient in pieces stays the mean over the replicas through these, until it is used.
_KEEPS_MEANS = (
    _KEEPS_SHARES
    | frozenset("add_any all_gather div mul name neg reduce_precision rev select_n sub".split())
    | {OPEN.name, PIECE.name}
)
_TELLS_NO_NUMBER = frozenset("eq ge gt is_finite le lt ne".split())
_FILE_OF_MEANS = share_of_mean.__code__.co_filename


@dataclasses.dataclass(frozen=True)
class MeanOverReplicas:
    """A line at which a step takes a mean over the replicas."""

    line: str
    # Whether a layer of a library takes it, such as a BatchNorm with an `axis_name`.
    is_in_layer: bool = False


@dataclasses.dataclass(frozen=True)
class _Fact:
    """The facts about one value of one replica."""

    number: float | None = None  # its number, if the trace shows it
    of_rows: bool = False  # depends on the rows of this replica, not only through a collective
    is_share: bool = False  # a summand of `all_reduce("mean")`, divided before the sum
    is_divided: bool = False  # was divided once
    is_term: bool = False  # was divided twice, the second time by the number of replicas
    total: MeanOverReplicas | None = None  # set if it is a sum over the replicas
    scattered: MeanOverReplicas | None = None  # set if it is a piece of such a sum
    # Set if it is a piece of a mean over the replicas that nothing has used. A product makes a
    # sum over the replicas of it (`all_reduce("sum", grads)` under FSDP).
    unused: MeanOverReplicas | None = None


def find_means(
    program: Any, of_rows: Sequence[bool], axes: frozenset[str], num_replicas: int
) -> tuple[MeanOverReplicas, ...]:
    """Return the means that a program takes over the replicas.

    Such a program divides a sum over the replicas, or the terms of the sum, by the number of
    replicas. So does the gradient of an array in pieces; `all_reduce("sum")` multiplies it again.
    `all_reduce("mean")` divides by a power of two before the sum and by the rest after it. A mean
    of values that do not depend on the rows of each replica, such as pieces of parameters or
    results of an all-reduce, is correct whatever the numbers of rows are.

    Args:
        program: The traced step of one replica, or its tape.
        of_rows: For each input, whether it has the rows of one replica.
        axes: The replica axes.
        num_replicas: The number of replicas.
    """
    analysis = _Means(axes, num_replicas)
    results = analysis.run(program, [_Fact(of_rows=own) for own in of_rows])
    analysis.found.extend(fact.unused for fact in results if fact.unused is not None)
    return tuple(dict.fromkeys(analysis.found))


def find_averages(averaged: Sequence[Sequence[tuple[int, str]]]) -> tuple[MeanOverReplicas, ...]:
    """Return the lines at which groups of replicas average over different numbers of rows.

    There each replica assumes that all replicas have as many rows as itself.

    Args:
        averaged: For each group, the numbers of rows and the lines at which it averages.
    """
    if len({tuple(sorted(found)) for found in averaged}) == 1:
        return ()
    rows: dict[str, list[list[int]]] = {}
    for found in averaged:
        for line in {line for _, line in found}:
            rows.setdefault(line, []).append(sorted(n for n, at in found if at == line))
    return tuple(
        MeanOverReplicas(f"{line}, where nn.compute_average_loss has no global_batch_size")
        for line, of_groups in rows.items()
        if any(other != of_groups[0] for other in of_groups)
    )


class _Means(ForwardAnalysis[_Fact]):
    of_constants = _Fact()

    def __init__(self, axes: frozenset[str], num_replicas: int) -> None:
        self._axes = axes
        self._num_replicas = num_replicas
        self._divided_before = next_power_of_two(num_replicas)
        self.found: list[MeanOverReplicas] = []

    def constant(self, variable: Any, value: Any) -> _Fact:
        return _Fact(read_number(value))

    def join(self, eqn: Any, aval: Any, first: _Fact, second: _Fact) -> _Fact:
        if first == second:
            return first
        return _Fact(
            of_rows=first.of_rows or second.of_rows,
            is_share=first.is_share or second.is_share,
            is_divided=first.is_divided or second.is_divided,
            is_term=first.is_term or second.is_term,
            total=first.total or second.total,
            scattered=first.scattered or second.scattered,
            unused=first.unused or second.unused,
        )

    def decide(self, eqn: Any, values: list[_Fact], decided_by: _Fact) -> list[_Fact]:
        if not decided_by.of_rows:
            return values
        return [dataclasses.replace(v, number=None, of_rows=True) for v in values]

    def call(self, eqn: Any, inputs: list[_Fact]) -> list[_Fact]:
        # An all-reduce of jaxdist may consist of permutes.
        if "plan" in eqn.params:
            return [self._sum(eqn, fact) for fact in inputs]
        return super().call(eqn, inputs)

    def operation(self, eqn: Any, inputs: list[_Fact]) -> list[_Fact]:
        name, over = eqn.primitive.name, self._axes & {*get_named_axes(eqn.params)}
        if over and name in known.COLLECTIVES:
            return self._collective(eqn, name, over, inputs)
        of_rows = any(fact.of_rows for fact in inputs)
        if name in _VALUE_PRESERVING or name in known.LAYOUT_ONLY:
            return inputs[:1]
        if name in known.PAIRWISE:
            return inputs
        unused = _find_unused(inputs)
        if unused is not None and name not in _TELLS_NO_NUMBER:
            return self._use(eqn, name, inputs, unused)
        if name in ("mul", "div"):
            return [self._divide(eqn, name, inputs, of_rows)]
        is_share = name in _KEEPS_SHARES and any(fact.is_share for fact in inputs)
        return [_Fact(of_rows=of_rows, is_share=is_share)] * len(eqn.outvars)

    def _collective(
        self, eqn: Any, name: str, over: frozenset[str], inputs: list[_Fact]
    ) -> list[_Fact]:
        unused = _find_unused(inputs)
        if unused is not None:
            return self._use(eqn, name, inputs, unused)
        if name in known.SUMS and over == self._axes:
            return [self._sum(eqn, fact) for fact in inputs]
        is_equal = name in known.REPLICATING or name in known.SCATTERS
        # An algorithm of several operations, or a sum of gradients in pieces.
        for fact in inputs:
            if fact.is_share and fact.of_rows and name not in known.REPLICATING - known.SUMS:
                self.found.append(_describe(eqn))
        of_rows = not is_equal and any(fact.of_rows for fact in inputs)
        if name in known.SCATTERS or name in known.SUMS:
            sums = [self._find_scattered(eqn, name, fact) for fact in inputs]
            return [_Fact(of_rows=of_rows, scattered=one) for one in sums]
        return [_Fact(of_rows=of_rows)] * len(eqn.outvars)

    def _find_scattered(self, eqn: Any, name: str, fact: _Fact) -> MeanOverReplicas | None:
        """Return the sum that a scatter makes, or a sum over other axes of a scattered sum."""
        if name in known.SUMS:
            return fact.scattered
        if not fact.of_rows:
            return None
        # The line that gathered the array whose gradient the scatter computes.
        line = getattr(eqn, "line", "") or _compat.find_caller_of_library(eqn)
        return MeanOverReplicas(f"{line.partition(', in ')[0]} (the gradient of arrays in pieces)")

    def _use(
        self, eqn: Any, name: str, inputs: list[_Fact], unused: MeanOverReplicas
    ) -> list[_Fact]:
        """Return the facts of an operation with a mean that nothing has used yet."""
        is_again_a_sum = name == "mul" and any(f.number == self._num_replicas for f in inputs)
        if is_again_a_sum:
            return [_Fact()]
        if name in _KEEPS_MEANS:
            return [_Fact(unused=unused)] * len(eqn.outvars)
        self.found.append(unused)
        return [_Fact()] * len(eqn.outvars)

    def _sum(self, eqn: Any, fact: _Fact) -> _Fact:
        if not fact.of_rows:
            return _Fact()
        total = _describe(eqn)
        if fact.is_share or fact.is_term:
            self.found.append(total)
        return _Fact(total=total)

    def _divide(self, eqn: Any, name: str, inputs: list[_Fact], of_rows: bool) -> _Fact:
        over, under = inputs
        if name == "mul" and over.number is not None:
            over, under = under, over
        if under.number is None:
            return _Fact(of_rows=of_rows)
        # The file of the operation tells a share from a user's product such as 0.5 * x**2.
        is_share = name == "mul" and np.isclose(under.number, 1 / self._divided_before)
        if is_share and _compat.is_from_file(eqn, _FILE_OF_MEANS):
            return _Fact(of_rows=of_rows, is_share=True)
        is_count = name == "div" and np.isclose(under.number, self._num_replicas)
        if is_count and over.total is not None:
            self.found.append(over.total)
            return _Fact(of_rows=of_rows)
        if is_count and over.scattered is not None:
            return _Fact(unused=over.scattered)
        if not under.number:
            return _Fact(of_rows=of_rows)
        divisor = under.number if name == "div" else 1 / under.number
        # One division is not enough: 0.5 * sum(x**2) is not a mean over two replicas. A mean of the
        # replica's own rows has one division, and the mean over replicas another.
        is_term = over.is_divided and bool(np.isclose(divisor, self._num_replicas))
        return _Fact(of_rows=of_rows, is_divided=True, is_term=is_term)


def _find_unused(facts: Sequence[_Fact]) -> MeanOverReplicas | None:
    return next((fact.unused for fact in facts if fact.unused is not None), None)


def _describe(eqn: Any) -> MeanOverReplicas:
    if _compat.is_called_by_layer(eqn):
        return MeanOverReplicas(_compat.find_caller_of_library(eqn), is_in_layer=True)
    return MeanOverReplicas(find_line(eqn))


def warn_of_means(
    where: str, means: Sequence[MeanOverReplicas], rows: Sequence[int], step: str
) -> None:
    """Warn that a step takes a mean over replicas that have these numbers of rows."""
    of_step = [mean.line for mean in means if not mean.is_in_layer]
    of_layers = [mean.line for mean in means if mean.is_in_layer]
    lines = of_step or of_layers
    who = "it takes" if of_step else "its layers take the statistics of a batch as"
    parts = [
        (
            f"{where}: the replicas have {list(rows)} rows in {step}, and {who} the mean over the "
            f"replicas at {', '.join(lines[:4])}."
        ),
        (
            "Each replica counts the same there, and not each example: a row on a replica with "
            "fewer rows counts more, and a replica without rows counts as zero."
        ),
    ]
    if of_step:
        parts.append(
            "For the mean over the examples: loss = jaxdist.nn.compute_average_loss(losses, "
            "global_batch_size=all_reduce('sum', x.shape[0])), and all_reduce('sum', grads). To "
            f"leave such batches out: {_LEAVE_OUT}."
        )
    if of_layers:
        also = f" (the layers at {', '.join(of_layers[:4])})" if of_step else ""
        parts.append(
            f"For the statistics of normalization layers{also}, such as BatchNorm with axis_name, "
            "no division of the loss helps. Leave out batches whose rows do not divide evenly: "
            f"{_LEAVE_OUT}; choose a batch size that divides the number of examples; or make the "
            "layer without axis_name, so that each replica uses the statistics of its own rows."
        )
    parts[-1] += (
        " If this is intended, silence it with warnings.filterwarnings('ignore', "
        "category=jaxdist.errors.UnevenMeanWarning)."
    )
    warnings.warn("\n\n".join(parts), UnevenMeanWarning, stacklevel=user_stack_level())


_LEAVE_OUT = "drop_remainder=True, or InputOptions(partial_batch=PartialBatch.DROP)"
