"""Functions that split values over the logical devices of a replica, or compute them on one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist import _replica
from jaxdist._called import call_as, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import assigned, laid_out, on_device
from jaxdist._typing import PyTree
from jaxdist._validate import check_callable
from jaxdist._values import (
    Form,
    Kind,
    PerReplica,
    Sharded,
    Stop,
    Variable,
    place_per_replica,
    placement_of,
    put,
    stops,
)
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError, ShapeError


def split(strategy: Any, value: PyTree, partition_dimensions: Any) -> PyTree:
    """Split every leaf of `value` over the logical devices."""
    caller = name_call()
    parts = _validate_parts(partition_dimensions)
    layout: ReplicaMesh = strategy.layout

    def check(name: str, shape: tuple[int, ...], dtype: Any) -> tuple[int, ...]:
        check_parts(f"{caller}: {name}, {dtype}{list(shape)},", shape, parts, layout.num_logical)
        return parts

    return _lay_out(strategy, value, check)


def replicate(strategy: Any, value: PyTree) -> PyTree:
    """Replicate every leaf of `value` to all logical devices."""
    return _lay_out(strategy, value, lambda _, shape, __: (1,) * len(shape))


def assign(strategy: Any, value: PyTree, device: Any) -> PyTree:
    """Mark every leaf of `value` to be computed on one logical device."""
    number = _validate_device(strategy, device)
    layout = _require_layout(strategy)

    def assign_leaf(name: str, leaf: Any) -> Any:
        array = _as_array(name, leaf)
        # With one logical device (also on the twin of `check_gradients`) a mark has no effect.
        return array if layout.num_logical == 1 else assigned(array, number)

    return _map_leaves(assign_leaf, value)


def on_logical_device(
    strategy: Any, device: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that computes calls of a function on one logical device."""
    number = _validate_device(strategy, device)
    caller = name_call()

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        call_as(caller, check_callable, fn)
        placed = on_device(fn, number)

        def run_placed(*args: Any, **kwargs: Any) -> Any:
            # Decided at the call: `check_gradients` runs the same function on a one-device twin.
            layout = call_as(caller, _require_layout, strategy)
            return (fn if layout.num_logical == 1 else placed)(*args, **kwargs)

        return run_placed

    return decorate


def _validate_device(strategy: Any, device: Any) -> int:
    count = strategy.layout.num_logical
    is_number = isinstance(device, (int, np.integer)) and not isinstance(device, bool)
    if not is_number:
        raise ArgumentTypeError(
            f"{name_call()}: logical_device_id={device!r} is not an integer.\n\n"
            f"Logical devices are numbered from 0 to {count - 1}, the same for every replica.\n\n"
            "Pass for instance logical_device_id=0."
        )
    # Under SPMD no number is valid, so the advice of the range check below would be wrong.
    if strategy.layout.spmd:
        raise ArgumentError(
            f"{name_call()}: the strategy was made with experimental_spmd_xla_partitioning=True, "
            f"and logical device {device} was requested.\n\nWith it, all logical devices of a "
            "replica run one program on their parts of each value.\n\nSplit the tensor, or make "
            "the strategy without it: TPUStrategy(resolver, assignment)."
        )
    if not 0 <= device < count:
        raise ArgumentError(
            f"{name_call()}: logical_device_id={device}, and a replica has {count} logical "
            "device(s).\n\n"
            f"They are numbered from 0 to {count - 1}; their number is the product of the "
            "computation_shape of the device assignment.\n\n"
            f"Pass a logical_device_id up to {count - 1}, or build the device assignment with a "
            "larger computation_shape."
        )
    return int(device)


def _require_layout(strategy: Any) -> ReplicaMesh:
    layout = find_layout_in_step(strategy)
    if layout is None:
        raise ContextError(
            f"{name_call()} was called outside of a step.\n\n"
            "It chooses the logical device that computes a value in a step. Arrays outside of a "
            "step are on all logical devices of a replica, or are split over them.\n\n"
            "Call it in the function that you pass to strategy.run. To place an array, use "
            "experimental_split_to_logical_devices or experimental_replicate_to_logical_devices."
        )
    return layout


def find_layout_in_step(strategy: Any) -> ReplicaMesh | None:
    """Return the layout of the step around the caller, or None outside of steps.

    The layout may be that of a one-device twin, on which `check_gradients` runs the step.

    Raises:
        ContextError: A step of another strategy, or a merge function.
    """
    # An ambient strategy is never a step, so only explicit frames matter.
    frame = _replica.innermost_explicit_frame()
    if frame is None or not frame.is_inside_step:
        return None
    runs = frame.strategy
    if (runs is not strategy and runs.stands_for is not strategy) or frame.in_merge:
        raise ContextError(
            f"{name_call()} was called {frame.describe()}.\n\n"
            "Logical devices are those of a replica, so it is called inside one, in a function "
            "that this strategy runs; or outside of every step, to place an array.\n\n"
            "Call it in the function that you pass to strategy.run, before the merge_call, with "
            "the strategy that runs it: jaxdist.get_replica_context().strategy."
        )
    return runs.layout


Check = Callable[[str, tuple[int, ...], Any], tuple[int, ...]]


def _lay_out(strategy: Any, value: PyTree, check: Check) -> PyTree:
    inside = find_layout_in_step(strategy)

    def lay_out_leaf(name: str, leaf: Any) -> Any:
        if inside is not None:
            return _constrain_in_step(name, leaf, check, inside)
        return _place_outside_step(name, leaf, check, strategy.layout)

    return _map_leaves(lay_out_leaf, value)


def _map_leaves(function: Callable[[str, Any], Any], value: PyTree) -> PyTree:
    """Apply `function` to the name and the value of each leaf; of a variable, to its array."""
    return jax.tree.map_with_path(
        lambda path, leaf: function(
            "tensor" + jax.tree_util.keystr(path),
            leaf.value() if isinstance(leaf, Variable) else leaf,
        ),
        value,
        is_leaf=stops(Stop.LAID_OUT),
    )


def _constrain_in_step(name: str, leaf: Any, check: Check, layout: ReplicaMesh) -> Any:
    array = _as_array(name, leaf)
    parts = check(name, array.shape, array.dtype)
    return array if layout.num_logical == 1 else laid_out(array, parts, layout)


def _place_outside_step(name: str, leaf: Any, check: Check, layout: ReplicaMesh) -> Any:
    if isinstance(leaf, Sharded):
        raise _make_type_error(name, leaf)
    if isinstance(leaf, PerReplica):
        leaf = place_per_replica(name, leaf, layout)
        scalars = leaf.form is Form.SCALARS
        rows = _place_rows(name, leaf.array, check, layout, scalars=scalars)
        # With virtual replicas, one shard holds the rows of several replicas.
        shared = layout.replicas_per_place
        return PerReplica.of_global(rows, scalars=scalars, replicas_per_shard=shared)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        leaf = np.asarray(leaf)
        if not _is_numeric(leaf.dtype):
            raise _make_type_error(name, leaf)
    if placement_of(leaf, layout).kind is Kind.PER_REPLICA:
        return _place_rows(name, leaf, check, layout, scalars=False)
    parts = check(name, leaf.shape, leaf.dtype)
    return _place(name, leaf, parts, layout.tiles(parts), layout)


def _place_rows(name: str, array: Any, check: Check, layout: ReplicaMesh, *, scalars: bool) -> Any:
    """Split the rows of each replica over its own logical devices."""
    rows = array.shape[0] // layout.num_replicas
    local = () if scalars else (rows, *array.shape[1:])
    parts = check(name, local, array.dtype)
    if parts and parts[0] > 1:
        raise ArgumentError(
            f"{name_call()}: {name} is a value for each replica, {array.dtype}{list(local)}, and "
            f"partition_dimensions={list(parts)} splits its dim 0.\n\n"
            "Outside of a step dim 0 is split over the replicas, and the logical devices of one "
            "replica hold all rows of that replica.\n\n"
            "Split another dim here, or split dim 0 in the step."
        )
    # Dim 0 of the global array is split over the replicas, not over logical devices.
    whole = (1, *parts[1:])
    tiles = layout.tiles(whole)
    spec = PartitionSpec(layout.replica_spec[0], *tuple(tiles.spec)[1:])
    return _place(name, array, whole, NamedSharding(tiles.mesh, spec), layout)


def _place(
    name: str,
    array: Any,
    parts: Sequence[int],
    sharding: NamedSharding,
    layout: ReplicaMesh,
) -> Any:
    # Under an outer `jax.jit` the array is traced, so it gets a constraint, not a `device_put`.
    if isinstance(array, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    for dim, (size, count) in enumerate(zip(array.shape, parts, strict=True)):
        # Outside of a program, all shards of a JAX array have the same size.
        if size % count:
            sizes = [s for s in (size - size % count, size + -size % count) if s]
            raise ShapeError(
                f"{name_call()}: dim {dim} of {name}, {array.dtype}{list(array.shape)}, has {size} "
                f"elements, and {size} is not a multiple of its {count} parts.\n\n"
                "An array outside of a step has parts of one size; XLA pads parts only inside of a "
                "step.\n\n"
                f"Make it {' or '.join(map(str, sizes))} long, or split it in the step."
            )
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    layout.check_can_run()
    return put(array, sharding)


def _validate_parts(given: Any) -> tuple[int, ...]:
    entries = given.tolist() if isinstance(given, np.ndarray) else given
    if not isinstance(entries, (list, tuple)) or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in entries
    ):
        raise ArgumentTypeError(
            f"{name_call()}: partition_dimensions={given!r} is not a list of integers.\n\n"
            "partition_dimensions has one integer for each dim of the tensor: the number of parts "
            "of that dim.\n\nPass for instance [1, 2], which splits dim 1 of a matrix into two."
        )
    return tuple(int(n) for n in entries)


def check_parts(
    what: str, shape: tuple[int, ...], parts: tuple[int, ...], num_logical: int
) -> None:
    """Raise an error if the parts do not fit the array or the number of logical devices."""
    remedy = _suggest_parts(shape, num_logical)
    if len(parts) != len(shape):
        raise ShapeError(
            f"{what} has {len(shape)} dim(s), and partition_dimensions={list(parts)} is for "
            f"{len(parts)}.\n\n"
            f"There is one number for each dim, 1 for a dim that is not split.\n\n{remedy}"
        )
    for dim, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if count < 1:
            raise ArgumentError(
                f"{what} has {size} element(s) in dim {dim}, and "
                f"partition_dimensions={list(parts)} asks for {count} parts of dim {dim}.\n\n"
                f"A dim is split into one part (not at all) or more.\n\n{remedy}"
            )
        if size < count:
            raise ShapeError(
                f"{what} has {size} element(s) in dim {dim}, and "
                f"partition_dimensions={list(parts)} splits it into {count} parts.\n\n"
                f"No part may be empty.\n\n{remedy}"
            )
    product = math.prod(parts)
    if product != num_logical:
        raise ArgumentError(
            f"{what} would be split into {product} part(s) by "
            f"partition_dimensions={list(parts)}, and a replica has {num_logical} logical "
            "device(s).\n\n"
            f"Each logical device gets one part.\n\n{remedy}"
        )


def _suggest_parts(shape: tuple[int, ...], num_logical: int) -> str:
    """Suggest a valid split, along the largest dim."""
    largest = max(range(len(shape)), key=shape.__getitem__, default=None)
    if largest is None or shape[largest] < num_logical:
        return (
            f"No dim of {list(shape)} is as long as {num_logical} parts: use "
            "experimental_replicate_to_logical_devices(tensor)."
        )
    parts = [num_logical if d == largest else 1 for d in range(len(shape))]
    return f"For {list(shape)} and {num_logical} logical device(s), pass for instance {parts}."


def _as_array(name: str, leaf: Any) -> jax.Array:
    # Values in a step belong to one replica. A `PerReplica` or `Sharded` is a closed-over value of
    # all replicas.
    if isinstance(leaf, (PerReplica, Sharded)):
        raise _make_type_error(name, leaf)
    is_array = isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")
    if not is_array and not _is_numeric(np.asarray(leaf).dtype):
        raise _make_type_error(name, leaf)
    return jnp.asarray(leaf)


def _is_numeric(dtype: Any) -> bool:
    return dtype == np.bool_ or jnp.issubdtype(dtype, np.number)


def _make_type_error(name: str, leaf: Any) -> ArgumentTypeError:
    kind = type(leaf).__name__
    what = f"an array of {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"of type {kind}"
    return ArgumentTypeError(
        f"{name_call()}: {name} is {what}.\n\n"
        "Logical devices hold parts of arrays of numbers.\n\n"
        "Pass an array of numbers, or a pytree of them."
    )
