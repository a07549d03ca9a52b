"""The mesh of a function that JAX traces around `strategy.run`."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.compile.program import Program
from jaxdist._values import view_auto
from jaxdist.errors import ContextError


def find_mesh_of_trace(layout: ReplicaMesh) -> AbstractMesh | None:
    """Return the mesh with Explicit axes that the types of the caller's values name; None for Auto.

    Raises:
        ContextError: JAX traces the caller under a mesh that has other devices, or Explicit axes
            of another mesh. A program over `layout` cannot be part of such a function.
    """
    if not _compat.is_inside_trace():
        return None
    mesh = _compat.get_context_mesh()
    if mesh is None or mesh.manual_axes:
        return None
    own = layout.mesh
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    same_devices = mesh.size == own.size and devices in (None, list(own.devices.flat))
    if same_devices and not mesh.explicit_axes:
        return None
    if same_devices and tuple(mesh.shape.items()) == tuple(own.shape.items()):
        abstract: AbstractMesh = mesh.abstract_mesh
        return abstract
    sizes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    types = ", ".join(f"{axis}: {size} {kind}" for (axis, size), kind in sizes)
    raise ContextError(
        f"strategy.run was called in a function that JAX is tracing (jax.jit, grad, scan), under "
        f"a mesh of {mesh.size} device(s) with the axes ({types}). The strategy's mesh has "
        f"{own.size} device(s) and the axes {dict(own.shape)}.\n\n"
        "Values in that function have the types of its mesh, and one program has one mesh.\n\n"
        "Call the function under jax.set_mesh(strategy.mesh), or without a mesh; or call "
        "strategy.run outside of it. Outside of traced functions every mesh may be set."
    )


def call_in_types_of_trace(
    program: Program,
    inner: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    around: AbstractMesh | None,
) -> Sequence[Any]:
    """Call a program in a function that JAX traces; arguments and results have its types.

    Args:
        program: The program.
        inner: The function that calls it.
        leaves: Its inputs.
        around: The mesh of the caller's context, if axes are Explicit.
    """
    if program.traced.is_explicit:
        with _compat.use_abstract_mesh(around or program.layout.mesh.abstract_mesh):
            return inner(*leaves)
    leaves = [*map(view_auto, leaves)]
    found = (_compat.get_explicit_mesh(x) for x in leaves)
    mesh = around or next((m for m in found if m is not None), None)
    if mesh is None:
        return inner(*leaves)
    # `jax.grad` outside of `jit` and of `jax.set_mesh` makes its cotangents on one device, and
    # JAX refuses types with a mesh there.
    specs = None if around is None and not _compat.is_staged() else _find_specs(program)
    return _compat.call_with_auto_types(inner, leaves, specs, mesh)


def _find_specs(program: Program) -> list[PartitionSpec]:
    """Return the layout of each result; it is whole over logical devices where XLA chooses."""
    layout = program.layout
    return [
        o.spec(layout) if s is None or s.mesh != layout.mesh else s.spec
        for o, s in zip(program.outputs, program.result_shardings, strict=True)
    ]
