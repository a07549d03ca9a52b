"""Reductions over the dim along which an array is cut: on pieces, then over the replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._values.sharded.cuts import Cut


def _smallest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def _largest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.inf
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
