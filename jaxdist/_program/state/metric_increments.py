"""A traced step that returns what each replica added to a metric, instead of the metric's value."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.nnx.graph_rules import Combination, Rule
from jaxdist._program.proof.from_zero import run_twice
from jaxdist._program.trace.trace import Argument, Signature, TracedStep, trace_local

_FROM_ZERO = frozenset({Rule.SUM, Rule.MOMENTS})


def numbers_of_metrics(combined: Sequence[Combination]) -> tuple[int, ...]:
    """Return the variables whose results must be the amounts that the step adds."""
    return tuple(n for c in combined if c.rule in _FROM_ZERO for n in c.numbers)


def trace_increments(
    traced: TracedStep, signature: Signature, combined: Sequence[Combination], layout: ReplicaMesh
) -> TracedStep:
    """Trace the step again with metrics that start at zero, so that they return increments."""
    # Old and new value are not subtracted: a large sum would lose the digits of a small increment.
    numbers = numbers_of_metrics(combined)
    if not numbers:
        return traced
    made = trace_local(traced.manual_axes, _FromZero(traced, numbers), signature, layout)
    # `trace_local` does not know these two.
    return dataclasses.replace(made, uneven=traced.uneven, means=traced.means)


class _FromZero:
    """A traced step as a function from flat local values, with increments as results."""

    def __init__(self, traced: TracedStep, numbers: tuple[int, ...]) -> None:
        self._traced = traced
        self._numbers = frozenset(numbers)
        self.template = traced.template
        self.num_graph = traced.num_graph
        self.paths = traced.paths
        self.shapes = traced.shapes
        self.cuts = traced.cuts
        self.__name__ = "step"

    def __call__(self, *leaves: Any) -> list[Any]:
        operands = self._traced.operands
        given = [leaves[o] if type(o) is Argument else o for o in operands]
        zeros = [
            jnp.zeros_like(leaves[o]) if type(o) is Argument and o in self._numbers else None
            for o in operands
        ]
        wanted = [i in self._numbers for i in range(len(self._traced.shapes))]
        # Both values at once: all other results need the metrics' real values.
        results, found = run_twice(self._traced.jaxpr, given, zeros, wanted)
        return [r if f is None else f for r, f in zip(results, found, strict=True)]
