"""The mesh of the caller's context, which `jax.set_mesh` sets."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

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
    """Whether the caller's context has a mesh whose devices JAX would all use.

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

    JAX refuses arrays on devices outside of the context's mesh, and a `shard_map` over
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
    """Wrap a function so that it computes as if no mesh were set; see `use_no_mesh`."""

    @functools.wraps(fn)
    def call_without_mesh(*args: Any, **kwargs: Any) -> Any:
        if not is_mesh_set():
            return fn(*args, **kwargs)
        with use_no_mesh():
            return fn(*args, **kwargs)

    return cast(F, call_without_mesh)


def get_explicit_mesh(value: Any) -> Any:
    """Return the abstract mesh that the type of a traced value names, if axes are Explicit."""
    mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
    return mesh if mesh is not None and mesh.explicit_axes else None


def find_spec_of_type(value: Any) -> PartitionSpec | None:
    """Return the sharding in the type of a traced value; None if no dim is split over an axis."""
    spec = getattr(getattr(jax.typeof(value), "sharding", None), "spec", None)
    return spec if spec is not None and any(e is not None for e in spec) else None


def call_with_auto_types(
    fn: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    specs: Sequence[PartitionSpec] | None,
    mesh: AbstractMesh,
) -> list[Any]:
    """Call `fn` in a traced function, with arguments whose types name no Explicit axis.

    Args:
        fn: A function of arrays.
        arguments: Traced values. Their types may name Explicit axes of `mesh`.
        specs: The sharding of each result. Only Explicit axes of `mesh` count. None: the types of
            the results name no Explicit axis either.
        mesh: The mesh of the types of the results.

    Returns:
        The results, with the types of the caller's mesh.
    """
    auto = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with use_abstract_mesh(auto):
        given = [
            x if get_explicit_mesh(x) is None else jax.sharding.reshard(x, PartitionSpec())
            for x in arguments
        ]
        results = fn(*given)
    if specs is None:
        return list(results)
    explicit = frozenset(mesh.explicit_axes)
    with use_abstract_mesh(mesh):
        return [
            jax.sharding.reshard(x, _keep_axes(spec, explicit))
            for x, spec in zip(results, specs, strict=True)
        ]


def _keep_axes(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """Return a spec with only these axes."""
    names = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec]
    kept = [tuple(n for n in entry if n in axes) for entry in names]
    return PartitionSpec(*(entry or None for entry in kept))
