"""The mark that says how a value lies over the logical devices of a replica."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh

# A primitive of ours, where JAX's sharding constraint has no names for parts of a mesh axis, and
# because what a step marks is looked up in its trace.
LOGICAL_LAYOUT = Primitive("jaxdist_logical_layout")

# In `parts`: what `jax.vmap` maps over is left to the partitioner.
OPEN = 0


def laid_out(array: Any, parts: Sequence[int], layout: ReplicaMesh) -> jax.Array:
    """`array`, cut over the logical devices into parts, a dim into each number of them.

    The cotangent lies as the value does. A dim that does not divide is padded by the partitioner,
    and cut again.

    Shapes:
        As it is.
    """
    [axis] = layout.logical_axes
    shape = tuple(layout.mesh.shape.items())
    marked: jax.Array = LOGICAL_LAYOUT.bind(array, parts=tuple(parts), axis=axis, mesh_shape=shape)
    return marked


def _lowered(context: Any, value: Any, *, parts: Any, axis: str, mesh_shape: Any) -> list[Any]:
    return [_compat.constrain_tiles(context, value, parts, axis, mesh_shape)]


def _batched(values: Sequence[Any], dims: Sequence[Any], *, parts: Any, **rest: Any) -> Any:
    [value], [dim] = values, dims
    marked = LOGICAL_LAYOUT.bind(value, parts=(*parts[:dim], OPEN, *parts[dim:]), **rest)
    return marked, dim


LOGICAL_LAYOUT.def_impl(lambda x, **_: x)
LOGICAL_LAYOUT.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(LOGICAL_LAYOUT, _lowered)
ad.deflinear2(LOGICAL_LAYOUT, lambda ct, _, **how: [LOGICAL_LAYOUT.bind(ct, **how)])
batching.primitive_batchers[LOGICAL_LAYOUT] = _batched
