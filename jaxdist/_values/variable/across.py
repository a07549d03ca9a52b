"""Access to variables outside a step, for all replicas at once."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._validate import show
from jaxdist._values.access import Change, VariableAggregation
from jaxdist._values.arrays import copy_if_writable, put, view_auto
from jaxdist._values.indexed_slices import IndexedSlices
from jaxdist._values.replicas.binding import current_binding
from jaxdist._values.replicas.per_replica import Form, PerReplica
from jaxdist._values.replicas.placement import place_per_replica
from jaxdist._values.variable.checks import cast_to_variable, check_value, parameter_name
from jaxdist._values.variable.placement import VariablePlacement
from jaxdist._values.variable.scatter import Scatter, check_can_scatter
from jaxdist.errors import ArgumentError, ContextError, ReplicaValueError


class Across:
    """Reads and changes all copies of a variable at once, on their own devices."""

    @_compat.outside_of_meshes
    def read(self, variable: Any) -> jax.Array:
        """Return the mirrored value, or the combined values of all replicas."""
        _refuse_plain_jit(variable, "read")
        held: jax.Array = variable.held
        if not variable.home.per_replica:
            return held
        check_can_combine(variable, "read")
        return variable.home.combine(held, variable.aggregation)

    @_compat.outside_of_meshes
    @called(lambda change: change.value)
    def update(self, variable: Any, change: Change, value: Any, *, read_value: bool) -> Any:
        """Change every copy."""
        home = variable.home
        # Every check comes before the assignment at the end, so that an error changes no copy.
        if read_value and home.per_replica:
            check_can_combine(variable, "changed and read")
        _refuse_plain_jit(variable, change.value)
        is_for_each = isinstance(value, PerReplica)
        if is_for_each:
            given = self._for_each_replica(variable, change, value)
            given = given if current_binding() is not None else home.bring_one(given)
        else:
            if _would_leak(value):
                raise _make_traced_value_error(variable, change)
            one = cast_to_variable(variable, value)
            # Each replica has one summand of the value, so the total is divided among them.
            is_split = home.per_replica and variable.aggregation is VariableAggregation.SUM
            if is_split and change is not Change.ASSIGN:
                raise make_ambiguous_sum_error(variable, change)
            # A cast makes another array, which nobody else can write to.
            own = copy_if_writable(one) if one is value else one
            given = home.split_sum(own) if is_split else home.copy_to_all(own)
        is_assigned, after = change is Change.ASSIGN, given
        if not is_assigned:
            after = change.apply(view_auto(variable.one_copy), view_auto(given))
        # XLA chooses the sharding of a sum, so the array is put back where the variable belongs.
        if home.sharding is not None and (is_for_each or not is_assigned):
            after = _put_back(home, after)
        variable.held = after
        if not read_value:
            return None
        if home.per_replica:
            return home.combine(after, variable.aggregation)
        return after if home.store is None else variable.held

    def _for_each_replica(self, variable: Any, change: Change, value: PerReplica) -> jax.Array:
        home = variable.home
        parameter = parameter_name()
        label = f"The {parameter} of Variable {variable.label!r}.{change.value}"
        if home.layout is None:
            raise ReplicaValueError(
                f"{label} is {show(value)}, and the variable belongs to no strategy.\n\n"
                "A variable of no strategy has one value.\n\n"
                "Combine the values first: strategy.reduce('MEAN', value, axis=None)."
            )
        placed = place_per_replica(label, value, home.layout)
        count = home.layout.num_replicas
        rows = placed.array
        local = () if placed.form is Form.SCALARS else (rows.shape[0] // count, *rows.shape[1:])
        check_value(variable.label, parameter, rows, variable.shape, variable.dtype, local)
        rows = rows.astype(variable.dtype)
        if home.per_replica:
            return rows
        if variable.aggregation is VariableAggregation.NONE:
            raise ReplicaValueError(
                f"{label} is a PerReplica of {count} values, and the variable is mirrored, with "
                "VariableAggregation.NONE.\n\n"
                "A mirrored variable has one value; its aggregation says how to make one of "
                "several.\n\n"
                "Give it aggregation=VariableAggregation.MEAN (or SUM, ONLY_FIRST_REPLICA), "
                "combine the values first (strategy.reduce('MEAN', value, axis=None)), or let "
                "every replica have its own: synchronization=VariableSynchronization.ON_READ."
            )
        return home.combine(rows, variable.aggregation)

    @_compat.outside_of_meshes
    def scatter(self, variable: Any, kind: Scatter, slices: IndexedSlices) -> None:
        """Change rows of all copies of a mirrored variable."""
        _refuse_plain_jit(variable, kind.value)
        check_can_scatter(variable, kind, of_replicas=False)
        if _would_leak(slices.values) or _would_leak(slices.indices):
            raise _make_traced_value_error(variable, kind)
        home = variable.home
        after = kind.apply(view_auto(variable.one_copy), _bring_slices(home, slices))
        variable.held = after if home.sharding is None else _put_back(home, after)


ACROSS = Across()


def _put_back(home: VariablePlacement, array: jax.Array) -> jax.Array:
    """Return a changed array in the layout of the variable, or as one copy to be kept."""
    is_kept = home.store is not None and current_binding() is None
    return array if is_kept else put(array, home.sharding)


def _bring_slices(home: VariablePlacement, slices: Any) -> Any:
    """Return rows on the device that keeps the variable; elsewhere JAX finds them by itself."""
    if home.store is None or current_binding() is not None:
        return slices
    values, indices = (home.bring_one(jnp.asarray(x)) for x in (slices.values, slices.indices))
    return type(slices)(values, indices)


def check_can_combine(variable: Any, what: str) -> None:
    """Raise if a per-replica variable has no aggregation that makes one value of its copies."""
    if variable.aggregation is not VariableAggregation.NONE:
        return
    raise ArgumentError(
        f"Variable {variable.label!r} was {what} across replicas, and it has its own value "
        "on each, with VariableAggregation.NONE.\n\n"
        "The aggregation says how to make one value of several.\n\n"
        "Give it an aggregation (SUM, MEAN, ONLY_FIRST_REPLICA), or take the values one by one: "
        "variable.values. To assign without reading, pass read_value=False."
    )


def make_ambiguous_sum_error(variable: Any, change: Change) -> ArgumentError:
    """Return the error for adding to a variable that is the sum of one value on each replica."""
    return ArgumentError(
        f"Variable {variable.label!r}.{change.value} was called across replicas, and the variable "
        "is the sum of a value on each replica.\n\n"
        "It is unknown to which of these values it should be added.\n\n"
        "Call it inside strategy.run, or assign the new total: "
        "variable.assign(variable.read_value() + value)."
    )


def _would_leak(value: Any) -> bool:
    """Whether a variable would keep `value`, a tracer, after its trace."""
    return isinstance(value, jax.core.Tracer) and current_binding() is None


def _refuse_plain_jit(variable: Any, what: str) -> None:
    if current_binding() is not None:  # a `jaxdist.function` passes variables as arguments
        return
    # An eager `jax.grad` or `jax.vmap` stages nothing, so reading is safe there. The test: only a
    # trace that stages operations returns a tracer for a constant.
    if not _compat.is_inside_trace() or not isinstance(jnp.zeros(()), jax.core.Tracer):
        return
    raise ContextError(
        f"Variable {variable.label!r}: {what} inside a function that jax.jit (or scan, or another "
        "transformation) is tracing, outside strategy.run.\n\n"
        "The compiled function would keep the value that the variable has now, and assignments "
        "would be lost.\n\n"
        "Decorate the function with jaxdist.function instead, or pass variable.read_value() as "
        "an argument and assign the result afterwards."
    )


@called(lambda variable, change: f"Variable {variable.label!r}.{change.value}")
def _make_traced_value_error(variable: Any, change: Change | Scatter) -> ContextError:
    return refuse(
        "a traced value outside strategy.run.",
        "A variable outlives the trace that the value belongs to.",
        "Return the value from the transformed function and assign it afterwards; inside "
        "strategy.run variables may be assigned under jax.grad.",
        kind=ContextError,
    )
