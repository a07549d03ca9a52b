"""Checks a user's step: its changes to the state of the user's layers, and to metrics."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist import _compat
from jaxdist._collectives import trace_beside_step
from jaxdist._keras.forward.aligned import may_vary
from jaxdist._keras.forward.pairs import trace_rows
from jaxdist._keras.listing import find_aggregations
from jaxdist._keras.models import name_of
from jaxdist._keras.rows import Rows
from jaxdist._keras.source import keras_module
from jaxdist._program import iterate_equations
from jaxdist.errors import StateDivergenceError

_ADD_UP = (
    "Leave out aggregation, and add up in the layer: self.rows.assign_add("
    "jaxdist.get_replica_context().all_reduce('sum', rows))."
)
_TRACE = "Let the step and its layers be functions that JAX can trace for every number of rows."


@dataclasses.dataclass(frozen=True)
class WrittenStep:
    """A step that the user wrote, and the inputs of one replica.

    Attributes:
        model: The model.
        run: Returns the non-trainable variables and those of the metrics after the step.
        state: The state of the step: the non-trainable variables are at place 1. The variables of
            the metrics, which `predict` does not have, are at the last place.
        batch: The rows of this replica.
        rows: The number of rows.
    """

    model: Any
    run: Callable[[Any, Any], tuple[Sequence[Any], Sequence[Any]]]
    state: Sequence[Any]
    batch: Any
    rows: Rows

    @functools.cached_property
    def traces(self) -> tuple[Any, Any]:
        """The programs that compute all these variables for two numbers of rows."""
        size = self.most
        with trace_beside_step():
            return self._trace(size), self._trace(size + 1)

    @property
    def most(self) -> int:
        """The smaller number of rows."""
        return max(self.rows.most, 2)

    def list_counts(self, numbers: Sequence[int]) -> list[int]:
        """Return the results that depend on the number of rows of a replica."""
        one, more = self.traces
        # The rows also differ between replicas, but `run` has its own errors for that.
        inputs = [False] * len(one.jaxpr.invars)
        axes = frozenset(self.rows.replica.strategy.layout.replica_axes)
        return [n for n in numbers if may_vary((one, n), (more, n), inputs, axes)]

    def gathers(self, number: int) -> bool:
        """Whether a result is computed from gathered values."""
        program, _ = _compat.drop_unused(self.traces[0], [number])
        return any(e.primitive.name.startswith("all_gather") for e in iterate_equations(program))

    def _trace(self, size: int) -> Any:
        rows = Rows(size, size * self.rows.count, self.rows.replica)

        def call(state: Any, batch: Any) -> list[Any]:
            fixed, metrics = self.run(state, batch)
            return [*fixed, *metrics]

        return trace_rows(self.model, rows, call, self.state, self.batch)


def check_written_step(step: WrittenStep, new: Sequence[Any]) -> None:
    """Check the changes of a user's step to the state of the user's layers.

    `run` proves that the values of the replicas are equal. A number of rows is equal on replicas
    with equally many rows, but Keras alone would use that of all rows. So the step is traced for
    two numbers of rows: see `forward/aligned.py`.

    Args:
        step: The step.
        new: The non-trainable variables after the step, from whose trace they come.

    Raises:
        StateDivergenceError: The step changed state that is summed over the replicas, or whose
            value depends on the number of rows of a replica.
    """
    aggregations = find_aggregations(step.model)
    changed = [n for n, (a, b) in enumerate(zip(step.state[1], new, strict=True)) if a is not b]
    sums = [n for n in changed if aggregations.get(n) == "sum"]
    if sums:
        what = "changes state with aggregation='sum'"
        why = "returns only values, which do not show what each replica has added"
        raise _make_error(step.model, sums, what, why, _ADD_UP)
    own = [n for n in changed if n in aggregations]
    if not own:
        return
    try:
        counts = step.list_counts(own)
    except Exception as error:
        size, have = step.most + 1, step.rows.own
        what = f"changes state, and cannot be traced for {size} rows instead of {have}"
        why = "jaxdist compares two traces to find state that belongs to one replica"
        raise _make_error(step.model, own, what, why, _TRACE) from error
    if counts:
        what = "computes state from the number of rows of one replica"
        why = "Keras alone would compute it from the number of all rows"
        raise _make_error(step.model, counts, what, why, _ADD_UP)


def check_written_metrics(step: WrittenStep, new: Sequence[Any]) -> None:
    """Check that a user's step updates no metric with the number of rows of one replica.

    This number is equal on replicas with equally many rows, so `run` finds nothing. A mean is right
    if its values and its weights both have it as a factor. A metric that is computed from gathered
    rows is not checked, since the trace does not show whose number it is. Nothing is checked if the
    step cannot be traced for other rows.

    Args:
        step: The step.
        new: The variables of the metrics after the step, from whose trace they come.

    Raises:
        StateDivergenceError: The step updates a metric with such a number.
    """
    model, variables = step.model, step.model.metrics_variables
    # The results of the traces begin with the non-trainable variables.
    first = len(step.state[1])
    pairs = enumerate(zip(step.state[-1], new, strict=True), first)
    changed = [n for n, (a, b) in pairs if a is not b]
    if not changed:
        return
    try:
        counts = {*step.list_counts(changed)}
    except Exception:
        return
    places = {id(v): n for n, v in enumerate(variables, first)}
    found: list[int] = []
    for metric in model.metrics:
        own = {places[id(v)] for v in metric.variables if id(v) in places}.intersection(changed)
        is_mean = isinstance(metric, keras_module("metrics").Mean)
        is_right = (is_mean and own <= counts) or any(map(step.gathers, own))
        if own & counts and not is_right:
            found += sorted(own & counts)
    if found:
        paths = [variables[n - first].path for n in found]
        raise StateDivergenceError(
            f"The Keras model {name_of(model)!r} has a step of its own, and this step "
            f"updates metrics with the number of rows of one replica: {paths}.\n\n"
            "The step runs on each replica with its rows, and Keras alone would use the number of "
            "all rows.\n\n"
            "All-reduce it: metric.update_state(jaxdist.get_replica_context().all_reduce('sum', "
            "1.0 * x.shape[0]))."
        )


def _make_error(
    model: Any, numbers: Sequence[int], what: str, why: str, remedy: str
) -> StateDivergenceError:
    paths = [model.non_trainable_variables[n].path for n in numbers]
    return StateDivergenceError(
        f"The Keras model {name_of(model)!r} has a step of its own, and this step "
        f"{what}: {paths}.\n\n"
        f"The step runs on each replica with its rows, and {why}.\n\n"
        f"{remedy} Or override compute_loss instead of the step."
    )
