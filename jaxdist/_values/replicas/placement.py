"""The kind of a value (mirrored, per-replica, sharded), read from its sharding."""

import dataclasses
import enum
import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._called import call_as, called
from jaxdist._integers import check_fits, is_unfit
from jaxdist._mesh import ReplicaMesh, make_auto_sharding
from jaxdist._values.arrays import copy_if_writable, put
from jaxdist._values.replicas.attached import find_shapes, take_own
from jaxdist._values.replicas.binding import origin_of
from jaxdist._values.replicas.numbers import check_integers, suggest_cast
from jaxdist._values.replicas.per_replica import Form, PerReplica
from jaxdist.errors import ReplicaValueError, ShapeError


class Kind(enum.Enum):
    """The three kinds of values that a step takes and returns."""

    MIRRORED = "mirrored"  # the same array on every replica
    PER_REPLICA = "per-replica"  # each replica has its own value
    SHARDED = "sharded"  # one array of which each replica holds a piece


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a value is placed: its kind, and its sharding over the whole mesh."""

    kind: Kind
    sharding: NamedSharding

    def manual_spec(self, layout: ReplicaMesh) -> PartitionSpec:
        """Return the part of the sharding over the replica axes, as `shard_map` needs it."""
        return PartitionSpec(
            *(_keep_axes(entry, layout.replica_axes) for entry in tuple(self.sharding.spec))
        )


def _keep_axes(entry: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return an entry of a `PartitionSpec` with only these axes."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(n for n in names if n in axes)


# Cached: comparing shardings takes microseconds, and `run` does it for every argument.
@functools.lru_cache(maxsize=4096)
def placement_of_sharding(sharding: Any, ndim: int, layout: ReplicaMesh) -> Placement | None:
    """Return the placement that a sharding already is, or None if the data must move first."""
    mirrored = Placement(Kind.MIRRORED, layout.replicated)
    if layout.num_places == 1 and layout.num_logical == 1:
        # On one device all shardings are equivalent, so only the names in the spec can tell rows of
        # virtual replicas from a mirrored array.
        here = sharding.device_set == {layout.devices[0]}
        if here and layout.num_virtual is not None and _is_split_over_replicas(sharding, layout):
            return Placement(Kind.PER_REPLICA, layout.per_replica)
        return mirrored if here else None
    if not isinstance(sharding, NamedSharding):
        return mirrored if sharding.is_equivalent_to(layout.replicated, ndim) else None
    # The same devices in another order hold other rows.
    if tuple(sharding.mesh.devices.ravel()) != tuple(layout.mesh.devices.ravel()):
        return None
    if sharding.is_equivalent_to(layout.replicated, ndim):
        return mirrored
    if ndim and sharding.is_equivalent_to(layout.per_replica, ndim):
        return Placement(Kind.PER_REPLICA, layout.per_replica)
    # Arrays may also be sharded over the logical axes. Their kind depends on the replica axes.
    if sharding.mesh.axis_names == layout.mesh.axis_names:
        own = NamedSharding(layout.mesh, sharding.spec)
    elif layout.is_factorized(sharding.mesh):
        own = sharding
    else:
        return None
    used = Placement(Kind.MIRRORED, own).manual_spec(layout)
    if all(entry is None for entry in used):
        return Placement(Kind.MIRRORED, own)
    if used[0] == layout.replica_spec[0] and all(e is None for e in tuple(used)[1:]):
        return Placement(Kind.PER_REPLICA, own)
    return None


def _is_split_over_replicas(sharding: Any, layout: ReplicaMesh) -> bool:
    """Whether a sharding over one device names the replica axes; to JAX it equals any other."""
    if not isinstance(sharding, NamedSharding) or not len(sharding.spec):
        return False
    used = Placement(Kind.MIRRORED, sharding).manual_spec(layout)
    return used[0] == layout.replica_spec[0]


def placement_of(leaf: Any, layout: ReplicaMesh) -> Placement:
    """Return the kind and the sharding that `leaf` has, or gets when it enters a step.

    An array over the devices of the mesh keeps its kind; everything else becomes mirrored. A
    `PerReplica` is always per-replica.
    """
    if isinstance(leaf, PerReplica):
        array = leaf.array if leaf.is_global else None
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            found = placement_of_sharding(array.sharding, array.ndim, layout)
            if found is not None and found.kind is Kind.PER_REPLICA:
                return found
        return Placement(Kind.PER_REPLICA, layout.per_replica)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        found = placement_of_sharding(leaf.sharding, leaf.ndim, layout)
        # An uncommitted array is where it is only by default, so its sharding is not kept.
        if found is not None and (found.kind is not Kind.MIRRORED or _compat.is_committed(leaf)):
            return found
    sharding = None
    if isinstance(leaf, jax.core.Tracer):
        origin = origin_of(leaf)
        if origin is None:
            sharding = _find_explicit_sharding(leaf, layout)
        else:
            sharding = origin.sharding if origin.is_committed else None
    elif isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    found = None if sharding is None else placement_of_sharding(sharding, leaf.ndim, layout)
    return found or Placement(Kind.MIRRORED, layout.replicated)


def _find_explicit_sharding(leaf: Any, layout: ReplicaMesh) -> NamedSharding | None:
    """Return the sharding in the type of a tracer, which JAX states for Explicit axes."""
    own = layout.mesh
    typed = jax.typeof(leaf).sharding
    if typed.mesh.axis_names != own.axis_names or typed.mesh.axis_sizes != own.axis_sizes:
        return None
    if not {*layout.replica_axes} <= {*typed.mesh.explicit_axes}:
        return None
    return NamedSharding(own, typed.spec)


def is_mirrored(value: Any, layout: ReplicaMesh) -> bool:
    """Whether an array is on all devices of the strategy, with the same value on every replica."""
    if isinstance(value, jax.core.Tracer):
        origin = origin_of(value)
        if origin is None:  # computed in the trace, so it is not a value of single replicas
            return True
        sharding, committed = origin.sharding, origin.is_committed
    elif isinstance(value, jax.Array):
        sharding, committed = value.sharding, _compat.is_committed(value)
    else:
        return False
    return (
        sharding is not None
        and committed
        and len(sharding.device_set) == len(layout.devices)
        and placement_of(value, layout).kind is Kind.MIRRORED
    )


@called("A PerReplica")
def place_per_replica(name: object, value: PerReplica, layout: ReplicaMesh) -> PerReplica:
    """Return `value` as one global array over this mesh; errors call it `str(name)`."""
    if layout.is_shared:
        value = take_own(value, layout)
    held = (value.array,) if value.is_global else value.values
    if all(isinstance(x, jax.ShapeDtypeStruct) for x in held):
        return _merge_shapes(name, value, layout)
    if layout.described is not None and not isinstance(value.values[0], jax.core.Tracer):
        call_as(f"A PerReplica of arrays ({name})", layout.check_can_run)
    if not value.is_global:
        return _place_values(name, value, layout)
    array = value.array
    if isinstance(array, jax.core.Tracer):
        _check_rows(name, array, layout)
        return value
    # Virtual replicas may share one device, which has all of the array then.
    one = layout.device_set if layout.num_virtual is not None and layout.num_places == 1 else None
    if isinstance(array, jax.Array) and (
        len(array.sharding.device_set) > 1 or array.sharding.device_set == one
    ):
        found = placement_of_sharding(array.sharding, array.ndim, layout)
        if found is None:
            raise ReplicaValueError(_explain_other_strategy(name, array, layout))
        if found.kind is Kind.PER_REPLICA or layout.num_places == 1:
            if layout.num_virtual is not None:
                _check_rows(name, array, layout)
            return value
    if layout.num_replicas == 1 and isinstance(array, jax.Array):
        return value
    _check_rows(name, array, layout)
    check_fits(name, array)
    return PerReplica.of_global(
        put(copy_if_writable(array), layout.per_replica),
        scalars=value.form is Form.SCALARS,
        replicas_per_shard=layout.replicas_per_place,
    )


def _merge_shapes(name: object, value: PerReplica, layout: ReplicaMesh) -> PerReplica:
    """Return a `PerReplica` of shapes (without arrays) as one global shape."""
    if value.is_global:
        _check_rows(name, value.array, layout)
        return value
    local: Any = value.values[0]
    if len(value.values) != layout.num_replicas or any(
        (x.shape, x.dtype) != (local.shape, local.dtype) for x in value.values
    ):
        raise ReplicaValueError(
            f"{name} is a PerReplica of {len(value.values)} jax.ShapeDtypeStruct(s), and the "
            f"strategy has {layout.num_replicas} replicas.\n\n"
            "There is one shape for each replica, the same for all.\n\n"
            f"Pass {layout.num_replicas} equal ones, or the global one: "
            "PerReplica.of_global(jax.ShapeDtypeStruct((replicas * rows, ...), dtype))."
        )
    rows, rest = (local.shape[0], local.shape[1:]) if local.shape else (1, ())
    whole: Any = jax.ShapeDtypeStruct((rows * layout.num_replicas, *rest), local.dtype)
    return PerReplica.of_global(
        whole, scalars=not local.shape, replicas_per_shard=layout.replicas_per_place
    )


def check_global(name: str, value: PerReplica, layout: ReplicaMesh) -> Any:
    """Return the global array of `value`; raise if it does not fit this mesh; move nothing."""
    array = value.array
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        # An array on one device is on no mesh yet; it belongs to no other strategy.
        devices = array.sharding.device_set
        if len(devices) > 1 and devices != layout.device_set:
            raise ReplicaValueError(_explain_other_strategy(name, array, layout))
    _check_rows(name, array, layout)
    return array


def _check_rows(name: object, array: Any, layout: ReplicaMesh) -> None:
    rows = array.shape[0] if array.ndim else 0
    if rows % layout.num_replicas or not array.ndim:
        raise ShapeError(
            f"{name} is a PerReplica whose global array is {array.dtype}{list(array.shape)}, and "
            f"the strategy has {layout.num_replicas} replicas.\n\n"
            f"Dim 0 must be a multiple of {layout.num_replicas}.\n\n{_suggest_rows(rows, layout)}"
        )


def check_virtual_rows(name: object, array: Any, layout: ReplicaMesh) -> None:
    """Raise if rows divide among the devices but not among the virtual replicas."""
    rows, count = array.shape[0], layout.num_replicas
    if rows % count:
        raise ShapeError(
            f"{name} is {array.dtype}{list(array.shape)}, laid out over the replicas, and the "
            f"{count} virtual replicas of deterministic=True cannot share {rows} rows.\n\n"
            f"Dim 0 must be a multiple of {count}.\n\n{_suggest_rows(rows, layout)}"
        )


def _suggest_rows(rows: int, layout: ReplicaMesh) -> str:
    """Return the remedy: the next numbers of rows below and above that divide."""
    count = layout.num_replicas
    sizes = [n for n in (rows - rows % count, rows + -rows % count) if n]
    return f"Use {' or '.join(map(str, sizes or [count]))} rows."


def _explain_other_strategy(name: object, array: jax.Array, layout: ReplicaMesh) -> str:
    theirs = sorted(str(d) for d in array.sharding.device_set)
    return (
        f"{name} is a PerReplica of another strategy. "
        f"It is on {len(theirs)} devices {theirs[:4]} as {array.sharding}; this strategy has "
        f"{layout.num_replicas} replicas on {[str(d) for d in layout.devices][:4]}.\n\n"
        "A PerReplica belongs to the strategy that made it.\n\n"
        "Make one array of it with other_strategy.gather(value, axis=0), and distribute that."
    )


def _place_values(name: object, value: PerReplica, layout: ReplicaMesh) -> PerReplica:
    is_inside = _compat.is_inside_trace()
    if is_inside and layout.is_shared:
        return _place_on_devices(name, value, layout, is_traced=True)
    if is_inside and not any(isinstance(x, jax.core.Tracer) for x in value.values):
        # Otherwise the trace would stage the copies to the devices as operations of the step.
        with jax.ensure_compile_time_eval():
            return _place_on_devices(name, value, layout)
    return _place_on_devices(name, value, layout)


@_compat.outside_of_meshes
def _place_on_devices(
    name: object, value: PerReplica, layout: ReplicaMesh, *, is_traced: bool = False
) -> PerReplica:
    """Return one array; with `is_traced`, in a program that several processes trace alike."""
    values = value.values
    # The program holds all replicas' values: an array of several processes cannot be a constant.
    numbers = range(layout.num_replicas) if is_traced else layout.local_replicas
    expected = len(numbers)
    if len(values) != expected:
        where = "in all processes, which trace one program" if is_traced else "in this process"
        raise ReplicaValueError(
            f"{name} is a PerReplica with {len(values)} values, and the strategy has {expected} "
            f"replicas {where}.\n\nA PerReplica has one value for each replica.\n\n"
            f"Pass a PerReplica of {expected} value(s)."
        )
    numbered = list(zip(numbers, values, strict=True))
    arrays = [copy_if_writable(_as_array(name, r, v)) for r, v in numbered]
    # Uneven values do not get here from `run` (they have their own path); here one array is needed.
    shapes = {(tuple(a.shape), str(a.dtype)) for a in arrays}
    if layout.is_shared and not is_traced:
        agreed = find_shapes(name, value, layout)
        shapes |= {(shape, str(arrays[0].dtype)) for shape in agreed or ()}
    if len(shapes) > 1:
        found = ", ".join(
            f"replica {r}: {a.dtype}{list(a.shape)}" for r, a in zip(numbers, arrays, strict=True)
        )
        largest = max((a.shape[0] if a.ndim else 0) for a in arrays)
        remedy = (
            f"Pad dim 0 to {largest} rows on every replica and carry a mask, or drop the rows "
            "that are too many (drop_remainder=True)."
        )
        if len({dtype for _, dtype in shapes}) > 1:
            remedy = suggest_cast("x", (a.dtype for a in arrays))
        raise ShapeError(
            f"{name} is a PerReplica whose values differ in shape or dtype: {found}.\n\n"
            "Inside a function that JAX traces, such as one under jax.jit, and where a replica has "
            "several devices, local values have one shape. Elsewhere their shapes may differ, and "
            f"rank and dtype are the same.\n\n{remedy}"
        )
    scalars = arrays[0].ndim == 0
    rows = [a[None] for a in arrays] if scalars else arrays
    return PerReplica.of_global(
        _join_on_devices(rows, layout, is_traced=is_traced),
        scalars=scalars,
        replicas_per_shard=layout.replicas_per_place,
    )


def _find_way(value: Any) -> str:
    """Return how to pass a value to a step that a `PerReplica` cannot hold there."""
    # `IndexedSlices` is made of values of this room, which cannot import it.
    if hasattr(value, "dense_shape") and hasattr(value, "indices"):
        return (
            "Pass the rows and their indices as two arguments, PerReplica([s.values for s in "
            "slices]) and PerReplica([s.indices for s in slices]), and make "
            "jaxdist.IndexedSlices(values, indices, dense_shape) in the step."
        )
    if jax.tree.structure(value).num_leaves > 1 or isinstance(value, (dict, tuple)):
        return (
            "Pass a pytree whose leaves are PerReplica: jax.tree.map(lambda *leaves: "
            "PerReplica(leaves), *value.values)."
        )
    return "Pass it as a plain argument instead."


def _as_array(name: object, replica: int, value: Any) -> Any:
    # NumPy arrays stay NumPy arrays, so that each value is copied straight to its own device.
    # A class such as `np.float32` has these attributes, too.
    if hasattr(value, "dtype") and hasattr(value, "ndim") and not callable(value):
        # Before the name, which most calls do not need.
        if is_unfit(value):
            check_fits(f"{name} with the value on replica {replica}", value)
        return value
    if not isinstance(value, (bool, int, float, complex, list)):
        raise ReplicaValueError(
            f"{name} is a PerReplica whose value on replica {replica} is "
            f"{type(value).__name__}: {value!r}.\n\n"
            "A step takes arrays and numbers that differ between replicas; other objects "
            "have to be the same everywhere, since one program runs on all replicas.\n\n"
            f"{_find_way(value)}"
        )
    check_integers(name, replica, value)
    return jax.numpy.asarray(value)


def _join_on_devices(rows: list[Any], layout: ReplicaMesh, *, is_traced: bool) -> jax.Array:
    # Tracers have no buffers to put together; in a trace the constraint places the rows.
    if is_traced or any(isinstance(x, jax.core.Tracer) for x in rows):
        place = make_auto_sharding(layout.per_replica)
        return jax.lax.with_sharding_constraint(jax.numpy.concatenate(rows), place)
    local = rows[0].shape
    shape = (local[0] * layout.num_replicas, *local[1:])
    shared = layout.replicas_per_place
    if shared > 1:
        starts = range(0, len(rows), shared)
        rows = [jax.numpy.concatenate(rows[i : i + shared]) for i in starts]
    on = {
        device: jax.device_put(rows[i // shared], device)
        for i, replica in enumerate(layout.local_replicas)
        for device in layout.device_grid[replica]
    }
    # In the order of the mesh: JAX sorts the shards of arrays by device, but not of random keys.
    pieces = [on[d] for d in layout.mesh.devices.flat if d in on]
    return jax.make_array_from_single_device_arrays(shape, layout.per_replica, pieces)
