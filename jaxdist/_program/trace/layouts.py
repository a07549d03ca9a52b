"""Checks the axes and devices that the operations of a traced step name."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist._program.trace.axis_errors import (
    check_names,
    layout_error,
    map_over_replicas_error,
)
from jaxdist._program.trace.step_errors import check_operands
from jaxdist.errors import DeviceError

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


def _where(eqn: Any) -> str:
    source = _compat.find_source(eqn)
    return f"strategy.run, at {source}," if source else "strategy.run"
