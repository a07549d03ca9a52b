"""Takes rows of an array in pieces, on every replica, without gathering the whole array."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._mesh import ReplicaMesh
from jaxdist._values.sharded.sharded import Sharded, open_to_gather


def take_rows(value: Sharded, ids: Any, layout: ReplicaMesh, dtype: Any = None) -> Any:
    """Return `jnp.take(array, ids, axis=0)`, whose gradient is that of `gather_whole`.

    Every replica gets the numbers of all rows, takes them from its own piece, and exchanges the
    parts of rows with the other replicas.
    """
    cut = value.cut
    axes = cut.over(layout)
    layout.check_axes_are_free("nn.embedding_lookup")
    own = open_to_gather(value, layout)
    of_all = jax.lax.all_gather(ids, axes)
    parts = jnp.take(own, of_all, axis=0, mode="fill")
    parts = parts if dtype is None else parts.astype(dtype)
    dim = ids.ndim + cut.dim
    rows = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=dim, tiled=True)[0]
    if rows.shape[dim - 1] == cut.size:
        return rows
    return jax.lax.slice_in_dim(rows, 0, cut.size, axis=dim - 1)
