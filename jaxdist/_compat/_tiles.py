"""Dims that are cut over parts of a mesh axis."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir.dialects import sdy as _sdy


def constrain_tiles(
    context: Any, value: Any, parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]
) -> Any:
    """Lower the wish that dims of a value are cut into parts over one mesh axis, the first slowest.

    Dims of 0 parts are left to the partitioner. `NamedSharding` has no names for parts of an
    axis, and both partitioners have. Waits for those names.

    Args:
        context: Of the lowering rule.
        value: What is lowered, as MLIR knows it.
        parts: For each dim; 1 is a dim that is whole everywhere.
        axis: The mesh axis.
        mesh_shape: Names and sizes of all axes of the mesh.
    """
    [aval] = context.avals_in
    # The raw bits of typed random keys have more dims.
    physical = _core.physical_aval(aval)
    parts = (*parts, *(1,) * (physical.ndim - len(parts)))
    if _config.use_shardy_partitioner.value:
        return _sdy.sharding_constraint(value, _tiles(parts, axis, mesh_shape))
    sizes = [n for n in parts if n > 1] or [dict(mesh_shape)[axis]]
    names = [f"{axis}_{i}" for i in range(len(sizes))]
    shape: dict[str, int] = {}
    for name, size in mesh_shape:
        shape.update(zip(names, sizes, strict=True) if name == axis else [(name, size)])
    free = iter(names)
    open_dims = {d for d, n in enumerate(parts) if n == 0}
    unconstrained = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = [next(free) if n > 1 else None if n else unconstrained for n in parts]
    manual = getattr(context.module_context.axis_context, "manual_axes", ())
    kinds = jax.sharding.AxisType
    types = tuple(kinds.Manual if name in manual else kinds.Auto for name in shape)
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    proto = sharding._to_xla_hlo_sharding(physical.ndim).to_proto()
    return _mlir.wrap_with_sharding_op(context, value, aval, proto, unspecified_dims=open_dims)


def _tiles(parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]) -> Any:
    mesh = _sdy.MeshAttr.get([_sdy.MeshAxisAttr.get(n, s) for n, s in mesh_shape], [])
    size = dict(mesh_shape)[axis]
    dims = []
    before = 1
    for count in parts:
        axes: list[Any] = []
        if count > 1:
            part = None if count == size else _sdy.SubAxisInfoAttr.get(before, count)
            axes = [_sdy.AxisRefAttr.get(axis, sub_axis_info=part)]
            before *= count
        dims.append(_sdy.DimensionShardingAttr.get(axes, is_closed=count > 0))
    return _sdy.TensorShardingAttr.get(mesh, dims)
