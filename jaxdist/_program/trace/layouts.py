"""Layouts inside a step: removes the axes of replicas, and checks axes and devices."""

# Note [Replica axes in layouts]
#
# Programs that were written for one array over the whole mesh say how values are laid out,
# `P("data", "model")`. In a step there is only the value of one replica. The rows are divided over
# the replicas before the step, so the axis says nothing new there, and layouts never change
# numbers. JAX refuses such an axis, since it is manual. So jaxdist removes the axes of replicas
# from every layout that a step gives to JAX, and logs it.
#
# Two kinds of functions make values that do depend on the axis, and raise errors. Random numbers
# and row numbers over the axis differ for each row of the whole array, but would be the same on
# each replica. An array made with as many rows as all replicas have together is not a value of one
# replica, and could broadcast against one row.

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist._program.trace.axis_errors import (
    check_names,
    layout_error,
    map_over_replicas_error,
    not_explicit_error,
)
from jaxdist._program.trace.step_errors import check_operands
from jaxdist._values import Kind
from jaxdist.errors import ContextError, DeviceError, ShapeError

# Operations of JAX that say how values are laid out, and the parameters with the layouts.
_LAYOUTS = {
    "sharding_constraint": ("sharding",),
    "jit": ("in_shardings", "out_shardings"),
    "pjit": ("in_shardings", "out_shardings"),
}


def names_layouts(program: Any) -> bool:
    """Whether some operation of a program says how a value is laid out."""
    return any(True for _ in _iterate_layouts(program))


def check_layouts(program: Any, layout: ReplicaMesh) -> None:
    """Check that a traced step splits no value over axes of replicas.

    XLA would refuse these operations when it compiles the step, or would take the rows of a
    replica for those of all replicas.

    Raises:
        AxisNameError: A collective is over something that is not the name of an axis.
        ContextError: A `jax.shard_map` or a layout names an axis of replicas.
        DeviceError: A layout is for other devices than those of the strategy.
        UnsupportedError: An operation computes with the indices of `IndexedSlices`.
    """
    replicas = frozenset(layout.replica_axes)
    for eqn in iterate_equations(program):
        find_line = functools.partial(_compat.find_source, eqn)
        check_names(eqn.primitive.name, eqn.params, find_line, layout)
        check_operands(eqn.primitive.name, [x.aval for x in eqn.invars], find_line)
        if eqn.primitive.name == "shard_map":
            specs = [*eqn.params["in_specs"], *eqn.params["out_specs"]]
            axes = frozenset(eqn.params["newly_manual_axes"]).union(*map(_axes_of, specs))
            if axes & replicas:
                raise map_over_replicas_error(_where(eqn), sorted(axes & replicas), layout)
    devices = frozenset(layout.mesh.devices.flat)
    for eqn, sharding in _iterate_layouts(program):
        if isinstance(sharding, NamedSharding) and _axes_of(sharding.spec) & replicas:
            raise layout_error(_where(eqn), tuple(sharding.spec), layout)
        found = _devices_of(sharding)
        # XLA accepts no other kind of layout in a program of replicas, whatever its devices are.
        if found is not None and (found != devices or not isinstance(sharding, NamedSharding)):
            raise DeviceError(
                f"{_where(eqn)} lays an array out by a {type(sharding).__name__} on {len(found)} "
                f"device(s), {sorted(map(str, found))[:4]}.\n\n"
                f"A step runs on all {len(devices)} devices of its strategy at once, and no "
                "operation in it can run on others.\n\n"
                "Leave the layout out, or move the array before the step: "
                "jax.device_put(x, strategy.replicated_sharding)."
            )


def _iterate_layouts(program: Any) -> Iterator[tuple[Any, Sharding]]:
    for eqn in iterate_equations(program):
        for name in _LAYOUTS.get(eqn.primitive.name, ()):
            for sharding in jax.tree.leaves(eqn.params[name]):
                if isinstance(sharding, Sharding):
                    yield eqn, sharding


def _axes_of(spec: Any) -> frozenset[str]:
    entries = spec if isinstance(spec, PartitionSpec) else ()
    flat = [a for e in entries for a in (e if isinstance(e, tuple) else (e,))]
    return frozenset(a for a in flat if isinstance(a, str))


def _devices_of(sharding: Sharding) -> frozenset[Any] | None:
    """Return the devices of a layout; None for one on a mesh without devices."""
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    return frozenset(sharding.device_set)


@called("strategy.run")
def _where(eqn: Any) -> str:
    source = _compat.find_source(eqn)
    return f"{name_call()}, at {source}," if source else name_call()


# With the functions of `jax.random`.
_NUMBERS_OF_ROWS = ("jnp.arange", "broadcasted_iota", "rng_bit_generator")


class LayoutsOfReplica:
    """Takes the axes of replicas out of the layouts that a step gives to JAX.

    Args:
        layout: The mesh of the strategy.
        inputs: The inputs of the step.
        axes: The axes to take out, if they are more than those of replicas.
    """

    def __init__(
        self, layout: ReplicaMesh, inputs: Sequence[InSlot], axes: frozenset[str] | None = None
    ) -> None:
        self._layout = layout
        self._axes = frozenset(layout.replica_axes) if axes is None else axes
        count = layout.num_replicas
        divided = [i for i in inputs if i.kind is Kind.PER_REPLICA and not i.is_scalar]
        self._own_rows = {i.local_shape(count)[0] for i in divided}
        self._all_rows = {i.shape[0]: i.local_shape(count)[0] for i in divided}
        # The changed layouts: the spec, the function that got it, and the line of the step.
        self.left_out: dict[str, None] = {}

    @property
    def key(self) -> Hashable:
        """A key that two layouts of one mesh share if they rewrite and check alike."""
        return self._axes, frozenset(self._own_rows), frozenset(self._all_rows.items())

    def __call__(self, sharding: Any, name: str) -> Any:
        """Return the sharding to pass to JAX's function `name`."""
        spec = self._find_spec(sharding)
        if spec is None:
            return sharding
        self._check_sums(name, spec)
        # An unreduced sum is not a layout.
        if self._axes & {*spec.unreduced, *spec.reduced}:
            return sharding
        entries = spec.partitions
        found = tuple(_without(e, self._axes) for e in entries)
        is_jit = name in ("jit", "pjit")
        if found != entries:
            self._check_values(name, entries)
            line = f"{entries} in {name} at {_compat.find_line_in_user_code()}"
            self.left_out[line] = None
        elif isinstance(sharding, PartitionSpec) != is_jit:
            return sharding
        around = jax.sharding.get_abstract_mesh()
        if not around.auto_axes:
            # No axis is left for XLA to choose, and JAX refuses UNCONSTRAINED.
            found = tuple(None if e is PartitionSpec.UNCONSTRAINED else e for e in found)
        kept = spec.update(partitions=found)
        mesh: Any = around
        # The layouts of a jitted function are compared as those of arrays, which have no manual
        # axes.
        if is_jit:
            mesh = self._layout.mesh if around.explicit_axes else self._layout.auto_mesh
        return NamedSharding(mesh, kept, memory_kind=self._find_memory(sharding))

    def _check_sums(self, name: str, spec: PartitionSpec) -> None:
        axes = frozenset(self._layout.replica_axes) & {*spec.unreduced, *spec.reduced}
        if axes:
            raise not_explicit_error(
                f"The step calls {name} at {_compat.find_line_in_user_code()} with the spec "
                f"{spec}, which leaves a sum over {sorted(axes)} unreduced.",
                self._layout,
            )

    def _check_values(self, name: str, entries: Sequence[Any]) -> None:
        """Check that a function makes valid values for one replica without the axis."""
        axes = frozenset(self._layout.replica_axes)
        dims = [d for d, e in enumerate(entries) if _without(e, axes) != e]
        if not dims or self._layout.num_replicas == 1:
            return
        where = f"The step calls {name} at {_compat.find_line_in_user_code()}"
        if name in _NUMBERS_OF_ROWS or hasattr(jax.random, name):
            raise ContextError(
                f"{where} with the spec {tuple(entries)}, over the replica axes {sorted(axes)}.\n\n"
                "Over such an axis every row of the whole array has a number of its own. A step "
                "makes the same numbers on each replica.\n\n"
                "Leave the axis out of the spec if they may be the same. Otherwise make them from "
                "jaxdist.nn.example_keys(key, x.shape[0]), or from "
                "jaxdist.get_replica_context().replica_id_in_sync_group."
            )
        shape = _compat.find_shape_asked_for() or ()
        for dim in (d for d in dims if d < len(shape)):
            rows = shape[dim]
            if rows in self._all_rows and rows not in self._own_rows:
                raise ShapeError(
                    f"{where} with the shape {list(shape)} and the spec {tuple(entries)}: "
                    f"{rows} rows, as all replicas have together.\n\n"
                    f"A step has the rows of one of {self._layout.num_replicas} replicas, "
                    f"{self._all_rows[rows]} here.\n\n"
                    "Take the number of rows from the batch: x.shape[0]."
                )

    def _find_memory(self, sharding: Any) -> str | None:
        """Return the memory of a layout, if it is not the usual one of the devices."""
        kind = sharding.memory_kind if isinstance(sharding, NamedSharding) else None
        # Described devices of a plan may know no memories, so a device is asked only for a name.
        if kind in (None, "device"):
            return None
        usual = self._layout.mesh.devices.flat[0].default_memory().kind
        return None if kind == usual else kind

    def _find_spec(self, sharding: Any) -> PartitionSpec | None:
        """Return the spec of a layout on the strategy's mesh; None for others."""
        if isinstance(sharding, PartitionSpec):
            return sharding
        if not isinstance(sharding, NamedSharding):
            return None
        mesh, own = sharding.mesh, self._layout.mesh
        if tuple(mesh.shape.items()) != tuple(own.shape.items()):
            return None
        if isinstance(mesh, Mesh) and list(mesh.devices.flat) != list(own.devices.flat):
            return None
        return sharding.spec


@called("strategy.run")
def describe_left_out(step: str, lines: Iterable[str], layout: ReplicaMesh) -> str:
    """Return the log line for layouts that lost an axis of replicas."""
    first, *others = lines
    more = f" and {len(others)} more" if others else ""
    return (
        f"{name_call()}: {step} names the replica axes {list(layout.replica_axes)} in a layout, "
        f"which has no effect: {first}{more}. A step has the values of one replica, whose rows are "
        "divided before it. Shapes in the step are those of one replica"
    )


def _without(entry: Any, axes: frozenset[str]) -> Any:
    """Return an entry of a spec without these axes."""
    if not isinstance(entry, tuple):
        return None if isinstance(entry, str) and entry in axes else entry
    kept = tuple(a for a in entry if a not in axes)
    return kept or None
