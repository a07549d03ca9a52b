"""The mesh of the caller's context, and the shardings that a program gives to JAX."""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
from flax.core import spmd as _spmd
from jax._src import config as _config
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src import sharding_impls as _sharding_impls
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxdist._compat.tracing import list_modules_of_jax
from jaxdist._contexts import REWRITING

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
    with use_empty_mesh():
        yield


@contextlib.contextmanager
def use_empty_mesh() -> Iterator[None]:
    """Set a mesh without devices, also where no mesh is set."""
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


_HERE = threading.local()
# Called by `reshard` and by all functions with `out_sharding=`.
_OUT_SHARDING = "canonicalize_sharding"
# Called by `with_sharding_constraint`, and by `jit` with `in_shardings=` or `out_shardings=`.
_CONSTRAINT = "_create_sharding_for_array"
# Called by a variable of Flax that is made with the names of axes.
_OF_VARIABLE = "_apply_sharding"

Rewrite = Callable[[Any, str], Any]


@contextlib.contextmanager
def rewrite_shardings(rewrite: Rewrite, key: Hashable = None) -> Iterator[None]:
    """Replace the shardings that functions of JAX get in the block, in this thread.

    Waits for JAX to accept a spec with axes that are manual around it.

    Args:
        rewrite: Takes a sharding and the name of the function of JAX that got it. Returns what JAX
            uses instead.
        key: Functions that JAX has traced with another key in place are traced again.
    """
    _install()
    before = getattr(_HERE, "rewrite", None)
    _HERE.rewrite = rewrite
    try:
        with REWRITING(key):
            yield
    finally:
        _HERE.rewrite = before


def _rewrite(sharding: Any, name: str) -> Any:
    rewrite: Rewrite | None = getattr(_HERE, "rewrite", None)
    return sharding if rewrite is None else rewrite(sharding, name)


@functools.cache
def _install() -> None:
    # The patched functions are global and other threads may trace at the same time, so the switch
    # is a thread-local value.
    out_sharding: Any = getattr(_sharding_impls, _OUT_SHARDING)
    constraint: Any = getattr(_pjit, _CONSTRAINT)
    of_variable: Any = getattr(_spmd, _OF_VARIABLE)

    def canonicalize(sharding: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return out_sharding(_rewrite(sharding, name), name, *args, **kwargs)

    def create(mesh: Any, sharding: Any, argument: str, name: str) -> Any:
        return constraint(mesh, _rewrite(sharding, name), argument, name)

    def lay_out_variable(value: Any, sharding: Any, mesh: Any) -> Any:
        # Flax refuses a mesh with axes that are manual.
        if getattr(_HERE, "rewrite", None) is None or not mesh.manual_axes:
            return of_variable(value, sharding, mesh)
        lay_out = jax.sharding.reshard if mesh.explicit_axes else jax.lax.with_sharding_constraint
        return lay_out(value, sharding)

    setattr(_spmd, _OF_VARIABLE, lay_out_variable)
    setattr(_pjit, _CONSTRAINT, create)
    # Modules of JAX import the function by its name.
    for module in list_modules_of_jax():
        if getattr(module, _OUT_SHARDING, None) is out_sharding:
            setattr(module, _OUT_SHARDING, canonicalize)
