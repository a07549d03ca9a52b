"""Metrics of all replicas: what a replica adds, constants that all add, sums divided too early."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist._called import called, name_call
from jaxdist._collectives import ASSUME_REPLICATED
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.retrace import user_stack_level
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.nnx import graph_rules
from jaxdist._program.nnx.graph import GraphShape
from jaxdist._program.nnx.graph_rules import Combination, Rule
from jaxdist._program.proof.divided import DividedValues, of_input
from jaxdist._program.proof.from_zero import run_twice
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.proof.same_work import SameWorkAnalysis
from jaxdist._program.trace.trace import Argument, Signature, TracedStep, trace_again
from jaxdist._values import Variable
from jaxdist.errors import DividedMetricWarning, StateDivergenceError

# In addition to the bits of `SameWorkAnalysis`: the value depends on the old value of a metric; on
# another input, or on a value that all replicas share.
_OLD = 4
_DATA = 8


@called("strategy.run")
def check_constant_additions(
    variables: Sequence[Variable],
    traced: TracedStep,
    old: Collection[int],
    first: int,
    axes: frozenset[str],
    num_replicas: int,
) -> None:
    """Raise if a step adds a constant to a metric, such as the number of one replica's rows.

    The number of rows is a constant of the trace, and equal on replicas with equally many rows.
    The metric would count it once. A metric that also gets data, or results of an all-reduce,
    has the values of all replicas.

    Args:
        variables: The variables that the step assigns.
        traced: The trace of one replica.
        old: The numbers of the inputs of the trace that are old values of metrics.
        first: The number of the result that is the new value of the first variable.
        axes: The replica axes.
        num_replicas: The number of replicas.

    Raises:
        StateDivergenceError: The step adds such a constant.
    """
    if not old:
        return
    given = [_OLD if i in old else _DATA for i in range(len(traced.operands))]
    results = _Additions(axes).run(traced.jaxpr, given)
    metrics: dict[str, dict[str, int]] = {}
    for i, variable in enumerate(variables):
        if variable._is_of_metric:
            metric, _, own = variable.label.rpartition("/")
            metrics.setdefault(metric, {})[own] = results[first + i]
    # The mean of equal values is that value, however often they are counted.
    found = [
        metric
        for metric, facts in metrics.items()
        if {*facts} != {"total", "count"} and {*facts.values()} == {_OLD}
    ]
    if found:
        raise StateDivergenceError(
            f"{name_call()} would add what one of {num_replicas} replicas counts to "
            f"{len(found)} metric(s) of Keras: {', '.join(found[:10])}.\n\n"
            "They have one value for all replicas. The step updates them with a constant, such as "
            "the number of rows of a replica, which would be added once.\n\n"
            "All-reduce it: metric.update_state(jaxdist.get_replica_context().all_reduce('sum', "
            "1.0 * x.shape[0])). To count steps, update the metric outside of the step. If the "
            "constant already counts all replicas, such as the number of gathered rows, say so: "
            "metric.update_state(jaxdist.assume_replicated(1.0))."
        )


class _Additions(SameWorkAnalysis):
    def operation(self, eqn: Any, inputs: list[int]) -> list[int]:
        name, named = eqn.primitive.name, {*get_named_axes(eqn.params)}
        results = super().operation(eqn, inputs)
        is_joint = bool(self._axes & named) and name in known.COLLECTIVES
        if is_joint or eqn.primitive is ASSUME_REPLICATED:
            return [fact | _DATA for fact in results]
        return results

    def call(self, eqn: Any, inputs: list[int]) -> list[int]:
        results = super().call(eqn, inputs)
        return [fact | _DATA for fact in results] if "plan" in eqn.params else results


def warn_of_divided_metrics(
    signature: Signature,
    traced: TracedStep,
    axes: frozenset[str],
    num_replicas: int,
    where: str,
) -> None:
    """Warn of NNX metrics whose means would be too small by the number of replicas.

    Args:
        signature: The signature of the step.
        traced: The trace of one replica, in which metrics have their values.
        axes: The replica axes of size two and more.
        num_replicas: The number of replicas.
        where: The line of the step.
    """
    graph = signature.graph
    if graph is None or not axes or not any(map(graph_rules.is_metric, graph.types)):
        return
    analysis = DividedValues(axes, num_replicas)
    results = analysis.run(traced.jaxpr, [of_input() for _ in traced.jaxpr.invars])
    lines = {i: s.line for i, s in enumerate(results[: len(graph.types)]) if s.line}
    found = {i: line for i, line in lines.items() if _has_count(graph, i, lines)}
    if found:
        names = ", ".join(graph.name(i) for i in found)
        divisions = ", ".join(dict.fromkeys(found.values()))
        warnings.warn(
            f"{where}: the step adds values that {divisions} divides by the rows of all replicas "
            f"to {len(found)} metric variable(s), {names}.\n\n"
            "A value divided like this is a share: the mean is the sum of the shares. The metric "
            f"adds up the shares and counts each of {num_replicas} replicas, so its mean is too "
            "small by the number of replicas.\n\n"
            "Give the metric the losses of the rows, metric.update(loss=losses), or the mean, "
            "metric.update(loss=jaxdist.get_replica_context().all_reduce('sum', loss)). If it is "
            "meant, silence this with warnings.filterwarnings('ignore', "
            "category=jaxdist.errors.DividedMetricWarning).",
            DividedMetricWarning,
            stacklevel=user_stack_level(),
        )


def _has_count(graph: GraphShape, number: int, lines: dict[int, str]) -> bool:
    """Whether the metric of a variable has another variable, such as a count of the values."""
    # A metric of a sum alone is correct: the sum of the shares is the mean.
    return graph_rules.is_metric(graph.types[number]) and any(
        graph_rules.is_metric(kind) and path[:-1] == graph.paths[number][:-1] and i not in lines
        for i, (kind, path) in enumerate(zip(graph.types, graph.paths, strict=True))
    )


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
