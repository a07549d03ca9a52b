"""Aggregation of the values that replicas assign to a variable."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _collectives
from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Change,
    IndexedSlices,
    PerReplica,
    Scatter,
    Variable,
    VariableAggregation,
    cast_to_variable,
    check_can_scatter,
    get_own_value,
    make_ambiguous_sum_error,
)


def aggregate_value(
    variable: Variable, change: Change, value: Any, layout: ReplicaMesh, *, in_merge: bool
) -> Any:
    """Return the value to assign or add to the copy of one replica, after aggregation."""
    is_own = not in_merge or isinstance(value, PerReplica)
    given = cast_own_value(variable, change, value, layout)
    if layout.num_replicas == 1:
        return given
    if variable.home.per_replica:
        return given if is_own else _share_of_copy(variable, change, given, layout)
    if not is_own:
        return given
    # A variable of no strategy is one variable for all replicas, so each replica's addition counts.
    if variable.home.layout is None:
        if change is Change.ASSIGN:
            return given
        # Each replica adds the same constant, so its sum needs no collective.
        if not isinstance(given, jax.core.Tracer):
            return given * layout.num_replicas
        return _collectives.sum_over_replicas(given, layout.replica_axes)
    return _aggregate_mirrored(variable, change, given, layout)


@called(lambda change: change.value)
def cast_own_value(variable: Variable, change: Change, value: Any, layout: ReplicaMesh) -> Any:
    """Return the value for the copy of one replica, in the dtype of the variable."""
    if isinstance(value, PerReplica):
        value = jnp.asarray(get_own_value(value, layout))
    return cast_to_variable(variable, value)


def _share_of_copy(variable: Variable, change: Change, given: Any, layout: ReplicaMesh) -> Any:
    """Return one replica's share of a value that a merge function assigns to all copies."""
    if variable.aggregation is not VariableAggregation.SUM:
        return given
    if change is not Change.ASSIGN:
        raise make_ambiguous_sum_error(variable, change)
    count = layout.num_replicas
    # The sum over the copies must be the value, as in TensorFlow: each copy gets a part.
    if jnp.issubdtype(variable.dtype, jnp.inexact):
        return (given / count).astype(variable.dtype)
    # The first replicas hold the remainder of an integer division.
    more = jax.lax.axis_index(layout.replica_axes) < given % count
    return given // count + more.astype(variable.dtype)


@called(lambda variable, change: f"Variable {variable.label!r}.{change.value}")
def _aggregate_mirrored(variable: Variable, change: Change, given: Any, layout: ReplicaMesh) -> Any:
    """Return the aggregate of the values that all replicas assign to a mirrored variable."""
    how = variable.aggregation
    is_constant = not isinstance(given, jax.core.Tracer)
    if how is VariableAggregation.SUM and is_constant:
        raise refuse(
            f"{given!r} inside a replica, and the variable has VariableAggregation.SUM.",
            "The sum is over a value that each replica computes; a constant is none of them, and "
            f"whether {layout.num_replicas} times the constant is meant cannot be told.",
            "Use VariableAggregation.MEAN or ONLY_FIRST_REPLICA for constants, or let each "
            "replica compute its part (jnp.asarray(value) inside the step).",
        )
    if is_constant or how is VariableAggregation.NONE:
        return given
    return aggregate(given, how, layout)


def collect_rows(
    variable: Variable, kind: Scatter, slices: IndexedSlices, layout: ReplicaMesh, *, in_merge: bool
) -> IndexedSlices:
    """Return the rows to apply to a mirrored variable, collected from all replicas."""
    check_can_scatter(variable, kind, of_replicas=not in_merge)
    how = variable.aggregation
    if variable.home.layout is None:
        # It is one variable for all replicas, so each replica's rows are applied.
        how = VariableAggregation.NONE if kind.is_choice else VariableAggregation.SUM
    if in_merge or layout.num_replicas == 1 or how is VariableAggregation.NONE:
        return slices
    values, indices = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        return type(slices)(aggregate(values, how, layout), aggregate(indices, how, layout))
    if how is VariableAggregation.MEAN:
        values = values / layout.num_replicas
    axes = layout.replica_axes
    return type(slices)(
        _collectives.gather_over_replicas(values, 0, axes),
        _collectives.gather_over_replicas(indices, 0, axes),
    )


def aggregate(own: Any, how: VariableAggregation, layout: ReplicaMesh) -> Any:
    """Return the aggregated value of all replicas; this is an all-reduce."""
    axes = layout.replica_axes
    if how is VariableAggregation.ONLY_FIRST_REPLICA:
        # A sum over replicas where all but the first hold 0 is a broadcast.
        is_first = jax.lax.axis_index(axes) == 0
        # `psum` does not sum booleans.
        numbers = own.astype(jnp.int8) if own.dtype == jnp.bool_ else own
        first = jnp.where(is_first, numbers, jnp.zeros_like(numbers))
        return jax.lax.psum(first, axes).astype(own.dtype)
    if how is VariableAggregation.SUM:
        return _collectives.sum_over_replicas(own, axes)
    return _collectives.mean_over_replicas(own, axes)
