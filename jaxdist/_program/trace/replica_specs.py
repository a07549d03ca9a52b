"""Layouts inside a step that name an axis of replicas."""

# Note [Replica axes in layouts]
#
# Programs that were written for one array over the whole mesh say how values are laid out,
# `P("data", "model")`. In a step there is only the value of one replica. The rows are divided over
# the replicas before the step, so the axis says nothing new there, and layouts never change
# numbers. JAX refuses such an axis, since it is manual. So every layout that a step gives to JAX
# loses the axes of replicas on its way, and the log says it.

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh


class LayoutsOfReplica:
    """Takes the axes of replicas out of the layouts that a step gives to JAX.

    Args:
        layout: The mesh of the strategy.
        axes: The axes to take out, if they are more than those of replicas.
    """

    def __init__(self, layout: ReplicaMesh, axes: frozenset[str] | None = None) -> None:
        self._layout = layout
        self._axes = frozenset(layout.replica_axes) if axes is None else axes
        self._left_out: dict[str, None] = {}

    @property
    def left_out(self) -> tuple[str, ...]:
        """What was taken out: a spec, the function that got it, and the line of the step."""
        return tuple(self._left_out)

    def __call__(self, sharding: Any, name: str) -> Any:
        """Return the sharding that the function `name` of JAX gets."""
        spec = self._find_spec(sharding)
        # A sum that is kept apart is no layout.
        if spec is None or self._axes & {*spec.unreduced, *spec.reduced}:
            return sharding
        entries = spec.partitions
        kept = spec.update(partitions=tuple(_without(e, self._axes) for e in entries))
        is_jit = name in ("jit", "pjit")
        if kept != spec:
            line = f"{entries} in {name} at {_compat.find_line_in_user_code()}"
            self._left_out[line] = None
        elif isinstance(sharding, PartitionSpec) != is_jit:
            return sharding
        around = jax.sharding.get_abstract_mesh()
        mesh: Any = around
        # The layouts of a jitted function are compared as those of arrays, which have no manual
        # axes.
        if is_jit:
            mesh = self._layout.mesh if around.explicit_axes else self._layout.auto_mesh
        return NamedSharding(mesh, kept, memory_kind=self._find_memory(sharding))

    def _find_memory(self, sharding: Any) -> str | None:
        """Return the memory of a layout, if it is not the usual one of the devices."""
        kind = sharding.memory_kind if isinstance(sharding, NamedSharding) else None
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


def describe_left_out(step: str, lines: Iterable[str], layout: ReplicaMesh) -> str:
    """Return the line of log for layouts that lost an axis of replicas."""
    first, *others = lines
    more = f" and {len(others)} more" if others else ""
    return (
        f"strategy.run: {step} names the replica axes {list(layout.replica_axes)} in a layout, "
        f"which has no effect: {first}{more}. A step has the values of one replica, whose rows are "
        "divided before it. Shapes in the step are those of one replica"
    )


def _without(entry: Any, axes: frozenset[str]) -> Any:
    """Return an entry of a spec without these axes."""
    if not isinstance(entry, tuple):
        return None if isinstance(entry, str) and entry in axes else entry
    kept = tuple(a for a in entry if a not in axes)
    return kept or None
