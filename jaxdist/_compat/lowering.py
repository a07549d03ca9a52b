"""Lowering: sharding constraints, dims split over parts of a mesh axis, host computation."""

import base64
import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.interpreters import mlir as _mlir
from jax._src.lib import tpu as _tpu
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.lib.mlir.dialects import sdy as _sdy
from jax.experimental import compute_on as _compute_on

from jaxdist._compat.tracing import set_in_block

_OMITS: ContextVar[bool] = ContextVar("jaxdist_omits_constraints", default=False)
_KERNEL = re.compile(r"body\\22: \\22([A-Za-z0-9+/=]+)")
_NAME = "lower_with_sharding_in_types"


def omit_open_constraints() -> contextlib.AbstractContextManager[None]:
    """Lower in this thread without sharding constraints that are open in all dims.

    If some mesh axes are manual and others automatic, JAX adds such a constraint to the result of
    nearly every operation. The partitioner for TPUs then treats a broadcast number as data: it
    computes one copy for all arrays of a shape, and sends it between devices to the arrays that are
    sharded differently. JAX plans to omit these constraints; then this is unnecessary.
    """
    _install()
    return set_in_block(_OMITS, True)


@functools.cache
def _install() -> None:
    # The function is global and other threads may lower at the same time, so the switch is a
    # context variable.
    original = getattr(_mlir, _NAME, None)
    if original is None:
        return

    def lower(context: Any, op: Any, aval: Any, *rest: Any) -> Any:
        if _OMITS.get() and _is_open(aval):
            return op
        return original(context, op, aval, *rest)

    setattr(_mlir, _NAME, lower)


# XLA of JAX 0.10 joins two slices at traced places, and forgets that the second one stays within
# the first. It writes a single row in this way, on the slice of a value that a device has. So the
# row of another device overwrote one of its own.
_SCATTERS_ARE_WRONG = jax.__version_info__ < (0, 12)


@functools.cache
def mend_scatters() -> None:
    """Lower scatters in partly manual programs with a barrier before the value written to.

    It is for all programs of the process: JAX may lower a step as part of the caller's function.
    Waits for the end of JAX 0.10.
    """
    if _SCATTERS_ARE_WRONG:
        for primitive in [p for p in _mlir._lowerings if p.name.startswith("scatter")]:
            rule = _mlir._lowerings[primitive].rule
            _mlir.register_lowering(primitive, _with_barrier(rule))


def _with_barrier(rule: Callable[..., Any]) -> Callable[..., Any]:
    def lower(context: Any, operand: Any, *rest: Any, **params: Any) -> Any:
        around = context.module_context.axis_context
        manual = getattr(around, "manual_axes", ())
        if manual and len(manual) < len(around.mesh.axis_names):
            operand = _hlo.OptimizationBarrierOp([operand]).results[0]
        return rule(context, operand, *rest, **params)

    return lower


def _is_open(aval: Any) -> bool:
    """Whether no mesh axis is Explicit."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and not mesh._any_axis_explicit


def compute_on_host(fn: Callable[..., Any], *args: Any) -> Any:
    """Compute `fn(*args)` on the host of the device, inside a compiled program.

    JAX 0.10 has another name for it. Waits for the end of JAX 0.10.
    """
    make: Any = getattr(_compute_on, "compute_on2", None) or _compute_on.compute_on
    space = jax.memory.Space
    hosted = make(fn, compute_type="device_host", out_memory_spaces=space.Host)
    moved = [jax.device_put(x, space.Host) for x in args]
    return jax.device_put(hosted(*moved), space.Device)


def constrain_tiles(
    context: Any, value: Any, parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]
) -> Any:
    """Lower a constraint that splits dims of a value over parts of one mesh axis.

    The first dim varies slowest over the axis. The partitioner decides about dims with 0 parts.
    `NamedSharding` cannot name parts of an axis, and both partitioners can. Waits for such names.

    Args:
        context: The context of the lowering rule.
        value: The MLIR value.
        parts: The number of parts of each dim; 1 is a dim that is not split.
        axis: The mesh axis.
        mesh_shape: Names and sizes of all axes of the mesh.
    """
    [aval] = context.avals_in
    # The raw bits of typed random keys have more dims.
    physical = _core.physical_aval(aval)
    parts = (*parts, *(1,) * (physical.ndim - len(parts)))
    if _config.use_shardy_partitioner.value:
        return _sdy.sharding_constraint(value, _make_tiles(parts, axis, mesh_shape))
    # GSPMD has no sub-axes: a mesh is described in which the axis is split into one axis per dim.
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


def _make_tiles(parts: Sequence[int], axis: str, mesh_shape: tuple[Any, ...]) -> Any:
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


def describe_lowered(lowered: jax.stages.Lowered) -> str:
    """Return the text of a lowered program, without what depends on where JAX is installed.

    JAX 0.10 writes kernels for TPUs with the files and lines that made them. Waits for its end.
    """
    return _KERNEL.sub(_describe_kernel, lowered.as_text())


def _describe_kernel(found: re.Match[str]) -> str:
    context = _mlir.make_ir_context()
    _tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        module = _ir.Module.parse(base64.b64decode(found[1]))
        return str(module.operation.get_asm(enable_debug_info=False))
