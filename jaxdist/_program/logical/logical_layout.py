"""The mark for the layout of a value over the logical devices of a replica."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh

# A primitive of jaxdist, for two reasons: JAX's sharding constraint cannot name parts of a mesh
# axis, and `MarkAnalysis` must find the marks of a step in its trace.
LOGICAL_LAYOUT = Primitive("jaxdist_logical_layout")

# In `parts`: the partitioner chooses the layout of a dim that `jax.vmap` maps over.
OPEN = 0


def laid_out(array: Any, parts: Sequence[int], layout: ReplicaMesh) -> jax.Array:
    """Return `array` with a mark that splits each dim into a number of parts.

    The cotangent gets the same layout. If a dim is not divisible by its parts, the partitioner pads
    it and removes the padding afterwards.

    Shapes:
        That of `array`.
    """
    [axis] = layout.logical_axes
    shape = tuple(layout.mesh.shape.items())
    marked: jax.Array = LOGICAL_LAYOUT.bind(array, parts=tuple(parts), axis=axis, mesh_shape=shape)
    return marked


def _lower(context: Any, value: Any, *, parts: Any, axis: str, mesh_shape: Any) -> list[Any]:
    return [_compat.constrain_tiles(context, value, parts, axis, mesh_shape)]


def _batch(values: Sequence[Any], dims: Sequence[Any], *, parts: Any, **rest: Any) -> Any:
    [value], [dim] = values, dims
    marked = LOGICAL_LAYOUT.bind(value, parts=(*parts[:dim], OPEN, *parts[dim:]), **rest)
    return marked, dim


LOGICAL_LAYOUT.def_impl(lambda x, **_: x)
LOGICAL_LAYOUT.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(LOGICAL_LAYOUT, _lower)
ad.deflinear2(LOGICAL_LAYOUT, lambda ct, _, **how: [LOGICAL_LAYOUT.bind(ct, **how)])
batching.primitive_batchers[LOGICAL_LAYOUT] = _batch
