"""Reads and changes variables inside a step; aggregates the values that replicas assign."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _collectives, _compat
from jaxdist._called import call_as, called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import Frame, enter_frame, innermost_explicit_frame
from jaxdist._typing import PyTree
from jaxdist._values import (
    Change,
    Handle,
    IndexedSlices,
    PerReplica,
    Scatter,
    Stop,
    Variable,
    VariableAggregation,
    cast_to_variable,
    check_can_combine,
    check_can_scatter,
    divide_parts,
    from_words,
    get_own_value,
    get_own_values,
    has_any_variable,
    is_variable,
    make_ambiguous_sum_error,
    stops,
    to_words,
    widen_integers,
)
from jaxdist.errors import MixedStrategyError


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
        return divide_parts(given, count).astype(variable.dtype)
    # The first replicas hold the remainder of an integer division.
    wide = widen_integers(given)
    more = jax.lax.axis_index(layout.replica_axes) < wide % count
    return (wide // count + more.astype(wide.dtype)).astype(variable.dtype)


@called(lambda variable, change: f"Variable {variable.label!r}.{change.value}")
def _aggregate_mirrored(variable: Variable, change: Change, given: Any, layout: ReplicaMesh) -> Any:
    """Return the aggregate of the values that all replicas assign to a mirrored variable."""
    how = variable.aggregation
    is_constant = not isinstance(given, jax.core.Tracer)
    if how is VariableAggregation.SUM and is_constant:
        raise refuse(
            f"{given!r} inside a replica, and the variable has VariableAggregation.SUM.",
            "The sum is over a value that each replica computes. A constant is not computed, and "
            f"whether {layout.num_replicas} times the constant is meant is unknown.",
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
        values = divide_parts(values, layout.num_replicas)
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
        words = to_words(own)
        first = jnp.where(is_first, words, jnp.zeros_like(words))
        return from_words(jax.lax.psum(first, axes), own.dtype)
    if how is VariableAggregation.SUM:
        return _collectives.sum_over_replicas(own, axes)
    return _collectives.mean_over_replicas(own, axes)


class StepAccess(abc.ABC):
    """Reads and changes variables inside a replica. Subclasses decide where values are stored."""

    def __init__(self, layout: ReplicaMesh) -> None:
        self._layout = layout

    @abc.abstractmethod
    def _own(self, variable: Variable) -> Any:
        """Return the value of this replica's copy."""

    def _own_to_change(self, variable: Variable) -> Any:
        """Return the value of this replica's copy, which the caller changes next."""
        return self._own(variable)

    @abc.abstractmethod
    def _write(self, variable: Variable, what: str, own: Any) -> None:
        """Store the value of this replica's copy; `what` is the name of the called method."""

    def _set(self, variable: Variable, what: str, value: Any) -> None:
        """Assign a value to this replica's copy; `what` is the name of the called method."""
        # As in TensorFlow, no gradient flows through an assignment.
        own = jax.lax.stop_gradient(value)
        if _compat.is_mapped(own):
            raise call_as(
                f"Variable {variable.label!r}.{what}",
                refuse,
                f"a value that jax.vmap maps over, and the variable is one {variable.dtype}"
                f"{list(variable.shape)}.",
                "Under vmap there is one value for each example, and the variable has room for "
                "one.",
                "Return the value from the mapped function, combine it (value.mean(axis=0)), and "
                "assign that outside jax.vmap.",
            )
        self._write(variable, what, own)

    @abc.abstractmethod
    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function for all replicas.

        Args:
            merged: The function that calls it, with these arguments and this access object.
            fn: The merge function itself.
            given: The arguments of this replica.
        """

    def read(self, variable: Variable) -> Any:
        """Return the value of `variable` in the current context (replica or merge function)."""
        own = self._own(variable)
        # As in TensorFlow: such a variable has one value across replicas only after aggregation.
        if self._in_merge and variable.home.per_replica:
            check_can_combine(variable, "read")
            return aggregate(own, variable.aggregation, self._layout)
        return own

    def update(self, variable: Variable, change: Change, value: Any, *, read_value: bool) -> Any:
        """Change this replica's copy; aggregate the value over the replicas if needed."""
        given = aggregate_value(variable, change, value, self._layout, in_merge=self._in_merge)
        self.change_own(variable, change, given)
        return self.read(variable) if read_value else None

    def scatter(self, variable: Variable, kind: Scatter, slices: IndexedSlices) -> None:
        """Change some rows of a mirrored variable."""
        rows = collect_rows(variable, kind, slices, self._layout, in_merge=self._in_merge)
        self.change_own(variable, kind, rows)

    def own_copies(self) -> "OwnCopies":
        """Return an access object that changes each replica's copy without aggregation."""
        return OwnCopies(self, self._layout)

    def change_own(self, variable: Variable, kind: Change | Scatter, given: Any) -> None:
        """Change this replica's copy by a value of the variable's dtype, or by rows."""
        self._set(variable, kind.value, kind.apply(self._own_to_change(variable), given))

    def read_own(self, variable: Variable) -> Any:
        """Return the value of this replica's copy."""
        return self._own(variable)

    @property
    def _in_merge(self) -> bool:
        frame = innermost_explicit_frame()
        return frame is not None and frame.in_merge


class OwnCopies:
    """The access object for a function that `StrategyExtended.update` calls: one copy at a time."""

    def __init__(self, step: StepAccess, layout: ReplicaMesh) -> None:
        self._step, self._layout = step, layout

    def own_copies(self) -> "OwnCopies":
        """Return this object."""
        return self

    def merge(self, merged: Callable[[Any, Any], Any], fn: Any, given: Any) -> Any:
        """Call a merge function for all replicas."""
        return self._step.merge(merged, fn, given)

    def read(self, variable: Variable) -> Any:
        """Return the value of this replica's copy."""
        return self._step.read_own(variable)

    def update(self, variable: Variable, change: Change, value: Any, *, read_value: bool) -> Any:
        """Change this replica's copy."""
        given = cast_own_value(variable, change, value, self._layout)
        self._step.change_own(variable, change, given)
        return self.read(variable) if read_value else None

    def scatter(self, variable: Variable, kind: Scatter, slices: IndexedSlices) -> None:
        """Change some rows of this replica's copy."""
        self._step.change_own(variable, kind, slices)


def check_same_strategy(variable: Variable, layout: ReplicaMesh) -> None:
    """Raise if a variable belongs to another strategy."""
    # A variable without a strategy can be used in steps of all strategies.
    home = variable.home.layout
    if home is not None and home != layout:
        raise MixedStrategyError(
            f"Variable {variable.label!r} was used in a step of another strategy. "
            f"It is on {[str(d) for d in home.devices][:4]} ({home.num_replicas} replicas); the "
            f"step runs on {[str(d) for d in layout.devices][:4]} ({layout.num_replicas} "
            "replicas).\n\n"
            "A variable belongs to the strategy in whose scope it was made.\n\n"
            "Run the step with that strategy, or make a variable in this one's scope: "
            "Variable(other.read_value())."
        )


def variables_as_values(value: PyTree) -> PyTree:
    """Return the same pytree with each variable replaced by its values on the replicas."""
    # Most programs have no variables: do not flatten then. A `PerReplica` has none either.
    if isinstance(value, PerReplica) or not has_any_variable():
        return value
    leaves, treedef = jax.tree.flatten(value, is_leaf=stops(Stop.READ))
    if not any(map(is_variable, leaves)):
        return value
    return treedef.unflatten(map(_value_on_replicas, leaves))


def _value_on_replicas(variable: Any) -> Any:
    if not is_variable(variable):
        return variable
    frame = innermost_explicit_frame()
    if frame is None or frame.variables is None:
        return variable.distributed
    # In a merge function `read` would aggregate the copies; `reduce` must see each of them.
    own = frame.variables.own_copies().read(variable)
    return Handle(own, frame.strategy.layout) if variable.home.per_replica else own


@dataclasses.dataclass(frozen=True)
class UpdateOfCopies:
    """A step that calls `fn` with a variable; `fn` changes only the replica's own copy."""

    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(
        self, variable: Variable, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function on one replica, or in a merge function for all of them."""
        # Only steps call it, and the frame of a step has variables.
        frame: Any = innermost_explicit_frame()
        layout = frame.strategy.layout
        # Each copy gets its own part of a `PerReplica` argument.
        own_args, own_kwargs = get_own_values((tuple(args), dict(kwargs or {})), layout)
        inside = Frame(frame.strategy, in_merge=True, variables=frame.variables.own_copies())
        with enter_frame(inside):
            return self.fn(variable, *own_args, **own_kwargs)
