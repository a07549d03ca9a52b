"""Arrays in pieces, made whole to be compared with those of one device."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values import PerReplica, Sharded, is_sharded


def in_one_piece(tree: PyTree) -> PyTree:
    """The same arrays, each cut for one replica."""
    return jax.tree.map(
        lambda x: Sharded(np.asarray(x.whole()), *x.cut) if is_sharded(x) else x,
        tree,
        is_leaf=_is_unit,
    )


def whole_arrays(tree: PyTree, layout: ReplicaMesh) -> PyTree:
    """Plain mirrored arrays in the place of those in pieces."""
    return jax.tree.map(
        lambda x: jax.device_put(x.whole(), layout.replicated) if is_sharded(x) else x,
        tree,
        is_leaf=_is_unit,
    )


def _is_unit(x: Any) -> bool:
    return isinstance(x, (Sharded, PerReplica, nnx.Pytree))
