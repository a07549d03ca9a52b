"""Reductions over the dim along which an array is cut: on pieces, then over the replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._values.sharded.cuts import Cut
from jaxdist._values.sharded.sharded import Sharded, open_to_gather


def _limit(dtype: Any, infinity: float) -> Any:
    """Return an infinity, or the last number of a dtype that has none (`float8_e4m3fn`)."""
    has_none = jnp.issubdtype(dtype, jnp.floating) and not np.isinf(np.asarray(infinity, dtype))
    if not has_none:
        return infinity
    return float(jnp.finfo(dtype).max if infinity > 0 else jnp.finfo(dtype).min)


def _smallest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return _limit(dtype, -np.inf)
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def _largest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return _limit(dtype, np.inf)
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max


# The values that padding gets, so that it does not change a reduction.
NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: False if dtype == np.bool_ else 0,
    "reduce_max": _smallest,
    "reduce_min": _largest,
    "reduce_and": _largest,
    "reduce_or": _smallest,
}


def mask_padding(piece: Any, cut: Cut, layout: ReplicaMesh, neutral: Any) -> Any:
    """Return the piece of this replica with `neutral` as padding."""
    count = cut.pieces(layout)
    if not cut.padding(count):
        return piece
    start = jax.lax.axis_index(cut.over(layout)) * cut.rows(count)
    places = jax.lax.broadcasted_iota(jnp.int32, piece.shape, cut.dim) + start
    return jnp.where(places < cut.size, piece, jnp.asarray(neutral, piece.dtype))


def reduce_over_replicas(name: str, own: Any, axes: tuple[str, ...]) -> Any:
    """Return the result of a reduction from the replicas' results for their pieces."""
    if name == "reduce_sum":
        return jax.lax.psum(own, axes)
    # XLA has no all-reduce of booleans on every backend.
    is_bool = own.dtype == np.bool_
    array = own.astype(jnp.int32) if is_bool else own
    reduce = jax.lax.pmin if name in ("reduce_min", "reduce_and") else jax.lax.pmax
    total = reduce(array, axes)
    return total.astype(bool) if is_bool else total


# Note [Exact reductions]
# A step may reduce booleans and integers over the dim along which they are cut: flags (`any`,
# `all`), and how many numbers are nan. The result is that of the whole array to the last bit, in
# whatever order the replicas are combined, and it has no derivative. A reduction of floats has
# neither property. `sharded_update` computes those, and a step has to gather the array.


def is_exact_reduction(eqn: Any, cut: Cut) -> bool:
    """Whether an operation reduces booleans or integers over the dim along which they are cut.

    See Note [Exact reductions].
    """
    name = eqn.primitive.name
    if name not in NEUTRAL or cut.dim not in eqn.params["axes"]:
        return False
    dtype = eqn.invars[0].aval.dtype
    if dtype == np.bool_:
        return name != "reduce_sum"
    # For integers, `reduce_and` and `reduce_or` combine the bits.
    return jnp.issubdtype(dtype, jnp.integer) and name not in ("reduce_and", "reduce_or")


def reduce_pieces(eqn: Any, piece: Any, cut: Cut, layout: ReplicaMesh) -> Any:
    """Return the result of an exact reduction, the same on all replicas."""
    name = eqn.primitive.name
    own = mask_padding(piece, cut, layout, NEUTRAL[name](piece.dtype))
    return reduce_over_replicas(name, eqn.primitive.bind(own, **eqn.params), cut.over(layout))


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
