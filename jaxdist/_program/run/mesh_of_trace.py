"""The mesh of a function that JAX traces around `strategy.run`."""

from jax.sharding import Mesh

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ContextError


def check_mesh_of_trace(layout: ReplicaMesh) -> None:
    """Raise if JAX traces the caller under a mesh that a program over `layout` cannot be part of.

    Raises:
        ContextError: The mesh has other devices, or Explicit axes of another mesh: the types of
            traced values name that mesh.
    """
    if not _compat.is_inside_trace():
        return
    mesh = _compat.get_context_mesh()
    if mesh is None or mesh.manual_axes:
        return
    own = layout.mesh
    devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    same_devices = mesh.size == own.size and devices in (None, list(own.devices.flat))
    if same_devices and not mesh.explicit_axes:
        return
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
