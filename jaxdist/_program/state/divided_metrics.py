"""Warns of metrics that get values already divided by the rows of all replicas."""

import warnings

from jaxdist._program.arguments.caller import user_stack_level
from jaxdist._program.nnx import graph_rules
from jaxdist._program.nnx.graph import GraphShape
from jaxdist._program.proof.divided import DividedValues, of_input
from jaxdist._program.trace.trace import Signature, TracedStep
from jaxdist.errors import DividedMetricWarning


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
        warnings.warn(
            f"{where}: the step adds to {len(found)} metric variable(s), {names}, what "
            f"{', '.join(dict.fromkeys(found.values()))} divides by the rows of all replicas.\n\n"
            "A value that is divided so is a share: the mean is the sum of the shares. The metric "
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
