"""Takes rows of an array by their numbers, also of one in pieces without gathering it."""

from typing import Any

import jax

from jaxdist._mesh import ReplicaMesh
from jaxdist._values.sharded.sharded import Sharded, open_to_gather


def take_known_rows(array: jax.Array, ids: Any) -> jax.Array:
    """Return rows of an array, with nan for the ids that are not rows.

    `jnp.take` counts negative ids from the end. Integers have no nan: a row that does not exist has
    the smallest value of a signed dtype, and the largest of an unsigned one.
    """
    return array.at[ids].get(mode="fill", wrap_negative_indices=False)


def take_rows(value: Sharded, ids: Any, layout: ReplicaMesh, dtype: Any = None) -> Any:
    """Return `take_known_rows(array, ids)`, whose gradient is that of `gather_whole`.

    Every replica gets the numbers of all rows, takes them from its own piece, and exchanges the
    parts of rows with the other replicas.
    """
    cut = value.cut
    axes = cut.over(layout)
    layout.check_axes_are_free("nn.embedding_lookup")
    own = open_to_gather(value, layout)
    of_all = jax.lax.all_gather(ids, axes)
    parts = take_known_rows(own, of_all)
    parts = parts if dtype is None else parts.astype(dtype)
    dim = ids.ndim + cut.dim
    rows = jax.lax.all_to_all(parts, axes, split_axis=0, concat_axis=dim, tiled=True)[0]
    if rows.shape[dim - 1] == cut.size:
        return rows
    return jax.lax.slice_in_dim(rows, 0, cut.size, axis=dim - 1)
