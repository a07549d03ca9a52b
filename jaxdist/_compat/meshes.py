"""The mesh of the caller's context, which `jax.set_mesh` sets."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from jax._src import config as _config
from jax._src import mesh as _mesh

F = TypeVar("F", bound=Callable[..., Any])

# JAX 0.12 moved both to another module.
_ABSTRACT: Any = (
    getattr(_mesh, "abstract_mesh_context_manager", None) or _config.abstract_mesh_context_manager
)
_CONCRETE: Any = getattr(_mesh, "device_context", None) or _config.device_context


def get_context_mesh() -> Any:
    """Return the mesh of the caller's context, with its devices if it has some; None without one.

    Waits for `jax.sharding.get_mesh` to work in traces.
    """
    abstract, concrete = _ABSTRACT.value, _CONCRETE.value
    has_devices = concrete is not None and not concrete.empty
    if abstract is None or abstract.empty:
        return concrete if has_devices else None
    same = has_devices and concrete.abstract_mesh == abstract
    return concrete if same else abstract


def is_mesh_set() -> bool:
    """Whether the caller's context has a mesh of which JAX would use all devices.

    Inside of a step, where the mesh is the strategy's own, it is false.
    """
    mesh = _ABSTRACT.value
    if mesh is not None and not mesh.empty:
        return not mesh.manual_axes
    devices = _CONCRETE.value
    return devices is not None and not devices.empty


@contextlib.contextmanager
def use_abstract_mesh(mesh: Any) -> Iterator[None]:
    """Trace over this mesh; the public context manager rejects another number of devices."""
    around = _ABSTRACT.swap_local(mesh)
    try:
        yield
    finally:
        _ABSTRACT.set_local(around)


@contextlib.contextmanager
def use_no_mesh() -> Iterator[None]:
    """Compute as JAX does where no mesh is set, even inside of `jax.set_mesh`.

    JAX refuses arrays on other devices than those of the context's mesh, and a `shard_map` over
    another mesh. Waits for a public way to leave a mesh; `jax.set_mesh(None)` is refused in traces.
    """
    if not is_mesh_set():
        yield
        return
    devices = _CONCRETE.swap_local(_mesh.empty_concrete_mesh)
    try:
        with use_abstract_mesh(_mesh.empty_abstract_mesh):
            yield
    finally:
        _CONCRETE.set_local(devices)


def outside_of_meshes(fn: F) -> F:
    """Wrap a function so that it computes as if no mesh was set; see `use_no_mesh`."""

    @functools.wraps(fn)
    def call_without_mesh(*args: Any, **kwargs: Any) -> Any:
        if not is_mesh_set():
            return fn(*args, **kwargs)
        with use_no_mesh():
            return fn(*args, **kwargs)

    return cast(F, call_without_mesh)
