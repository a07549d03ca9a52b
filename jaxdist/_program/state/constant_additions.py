"""Refuses steps in which every replica adds the same constant to a metric of all replicas."""

from collections.abc import Collection, Sequence
from typing import Any

from jaxdist._collectives import ASSUME_REPLICATED
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.proof.same_work import SameWorkAnalysis
from jaxdist._program.trace.trace import TracedStep
from jaxdist._values import Variable
from jaxdist.errors import StateDivergenceError

# In addition to the bits of `SameWorkAnalysis`: the value depends on the old value of a metric; on
# another input, or on a value that all replicas share.
_OLD = 4
_DATA = 8


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
            f"strategy.run would add what one of {num_replicas} replicas counts to "
            f"{len(found)} metric(s) of Keras: {', '.join(found[:10])}.\n\n"
            "They have one value for all replicas. The step updates them with a constant, such as "
            "the number of rows of a replica, which would be added once.\n\n"
            "All-reduce it: metric.update_state(jaxdist.get_replica_context().all_reduce('sum', "
            "1.0 * x.shape[0])). To count steps, update the metric outside of the step. Where the "
            "constant is that of all replicas, as the number of gathered rows, say so: "
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
