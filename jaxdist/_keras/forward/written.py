"""What a step that the user wrote does with state of own layers and with metrics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._collectives import trace_beside_step
from jaxdist._keras.forward.marks import trace_with_marks
from jaxdist._keras.forward.owners import find_aggregations
from jaxdist._keras.forward.traced import TracedReplica
from jaxdist._keras.forward.variation import may_vary
from jaxdist._keras.models import forget_losses, name_of
from jaxdist._keras.rows import Rows, use_rows
from jaxdist._keras.source import keras_module
from jaxdist._program import iterate_equations
from jaxdist.errors import StateDivergenceError

_ADD_UP = (
    "Leave out aggregation, and add up in the layer: self.rows.assign_add("
    "jaxdist.get_replica_context().all_reduce('sum', rows))."
)
_TRACE = "Let the step and its layers be functions that JAX can trace for every number of rows."


def check_written_step(
    model: Any,
    step: Callable[[Any, Any], Sequence[Any]],
    state: Sequence[Any],
    batch: Any,
    new: Sequence[Any],
    rows: Rows,
) -> None:
    """Check what a step of the user has changed in the state of own layers.

    `run` proves that the values of the replicas are equal. A number of rows is equal on replicas
    with equally many rows, and Keras alone would have that of all rows. So the step is traced for
    two numbers of rows: see `forward/variation.py`.

    Args:
        model: The model.
        step: Returns the variables that are not trained after the step.
        state: What it is given, with the variables that are not trained at place 1.
        batch: The rows of this replica.
        new: The variables that are not trained after the step, whose trace this is.
        rows: How many rows these are.

    Raises:
        StateDivergenceError: It has changed state that is summed over the replicas, or whose value
            depends on the number of rows of a replica.
    """
    aggregations = find_aggregations(model)
    changed = [n for n, (a, b) in enumerate(zip(state[1], new, strict=True)) if a is not b]
    sums = [n for n in changed if aggregations.get(n) == "sum"]
    if sums:
        what = "changes state with aggregation='sum'"
        why = "returns values. What each replica has added does not follow from them"
        raise _make_error(model, sums, what, why, _ADD_UP)
    own = [n for n in changed if n in aggregations]
    if not own:
        return
    size = max(rows.most, 2)
    try:
        with trace_beside_step():
            one, more = (_trace(model, step, state, batch, n, rows) for n in (size, size + 1))
    except Exception as error:
        what = f"changes state, and cannot be traced for {size + 1} rows in place of {rows.own}"
        why = "jaxdist compares two traces to find state that belongs to one replica"
        raise _make_error(model, own, what, why, _TRACE) from error
    # The rows differ between replicas too. What `run` finds of them has errors of its own.
    inputs = [False] * len(one.jaxpr.invars)
    axes = frozenset(rows.replica.strategy.layout.replica_axes)
    counts = [n for n in own if may_vary((one, n), (more, n), inputs, axes)]
    if counts:
        what = "computes state from the number of rows of one replica"
        why = "Keras alone would compute it from the number of all rows"
        raise _make_error(model, counts, what, why, _ADD_UP)


def check_written_metrics(
    model: Any,
    step: Callable[[Any, Any], Sequence[Any]],
    state: Sequence[Any],
    batch: Any,
    new: Sequence[Any],
    rows: Rows,
) -> None:
    """Check that a step of the user updates no metric with the number of rows of one replica.

    It is equal on replicas with equally many rows, so `run` finds nothing. A mean whose values and
    weights both have it as a factor is right. Where the step gathers rows, the trace does not show
    whose number it is, and so for a step that cannot be traced for other rows.

    Args:
        model: The model.
        step: Returns the variables of the metrics after the step.
        state: What it is given, with these variables at the last place.
        batch: The rows of this replica.
        new: The variables of the metrics after the step, whose trace this is.
        rows: How many rows these are.

    Raises:
        StateDivergenceError: It updates one with such a number.
    """
    variables = model.metrics_variables
    changed = {n for n, (a, b) in enumerate(zip(state[-1], new, strict=True)) if a is not b}
    if not changed:
        return
    size = max(rows.most, 2)
    try:
        with trace_beside_step():
            one, more = (_trace(model, step, state, batch, n, rows) for n in (size, size + 1))
    except Exception:
        return
    axes = frozenset(rows.replica.strategy.layout.replica_axes)
    inputs = [False] * len(one.jaxpr.invars)
    counts = {n for n in changed if may_vary((one, n), (more, n), inputs, axes)}
    places = {id(v): n for n, v in enumerate(variables)}
    found: list[int] = []
    for metric in model.metrics:
        own = {places[id(v)] for v in metric.variables if id(v) in places} & changed
        is_mean = isinstance(metric, keras_module("metrics").Mean)
        is_right = (is_mean and own <= counts) or any(_gathers(one, n) for n in own)
        if own & counts and not is_right:
            found += sorted(own & counts)
    if found:
        paths = [variables[n].path for n in found]
        raise StateDivergenceError(
            f"A step of its own class trains or evaluates the Keras model {name_of(model)!r}, and "
            f"updates metrics with the number of rows of one replica: {paths}.\n\n"
            "The step runs on each replica with its rows, and Keras alone would use the number of "
            "all rows.\n\n"
            "All-reduce it: metric.update_state(jaxdist.get_replica_context().all_reduce('sum', "
            "1.0 * x.shape[0]))."
        )


def _gathers(closed: Any, number: int) -> bool:
    program, _ = _compat.drop_unused(closed, [number])
    return any(e.primitive.name.startswith("all_gather") for e in iterate_equations(program))


def _trace(
    model: Any,
    step: Callable[[Any, Any], Sequence[Any]],
    state: Sequence[Any],
    batch: Any,
    size: int,
    rows: Rows,
) -> Any:
    """Return the program that computes the variables for so many rows of a replica."""
    numbers = {id(v): n for n, v in enumerate(model.non_trainable_variables)}

    def call(number: Any, state: Any, batch: Any) -> list[Any]:
        replica = TracedReplica(rows.replica.strategy, rows.count, number)
        own = Rows(size, size * rows.count, replica, has_shares=False)
        forget_losses(model)
        with use_rows(own), trace_with_marks(numbers):
            return list(step(state, batch))

    def shape(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    def shape_of_rows(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.make_jaxpr(call)(
        number, jax.tree.map(shape, state), jax.tree.map(shape_of_rows, batch)
    )


def _make_error(
    model: Any, numbers: Sequence[int], what: str, why: str, remedy: str
) -> StateDivergenceError:
    paths = [model.non_trainable_variables[n].path for n in numbers]
    return StateDivergenceError(
        f"A step of its own class trains or evaluates the Keras model {name_of(model)!r}, and "
        f"{what}: {paths}.\n\n"
        f"The step runs on each replica with its rows, and {why}.\n\n"
        f"{remedy} Or override compute_loss in place of the step."
    )
