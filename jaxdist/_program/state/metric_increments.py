"""A traced step that returns what each replica added to a metric, instead of the metric's value."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.nnx.graph_rules import Combination, Rule
from jaxdist._program.proof.from_zero import run_twice
from jaxdist._program.trace.trace import Argument, Signature, TracedStep, trace_again

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
    wanted = [i in numbers for i in range(len(traced.shapes))]

    def step(*leaves: Any) -> list[Any]:
        zeros = [
            jnp.zeros_like(leaves[o]) if type(o) is Argument and o in numbers else None
            for o in traced.operands
        ]
        # Both values at once: all other results need the metrics' real values.
        results, found = run_twice(traced.jaxpr, traced.given(leaves), zeros, wanted)
        return [r if f is None else f for r, f in zip(results, found, strict=True)]

    return trace_again(traced, step, signature, layout)
