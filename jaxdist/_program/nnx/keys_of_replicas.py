"""Random keys of NNX objects: one key between steps, one stream for each replica in a step."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._typing import AxisNames


def fold_in_replica(keys: Any, axes: AxisNames) -> Any:
    """Return the keys of one replica, derived from the keys that all replicas share."""
    # `fold_in` takes one key, so it is mapped over each dim of an array of keys.
    fold = jax.random.fold_in
    for _ in range(keys.ndim if _is_typed(keys) else keys.ndim - 1):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, jax.lax.axis_index(axes))


def keys_for_next_step(before: Any, entered: Any, after: Any, axes: AxisNames) -> Any:
    """Return the keys for the next step, after the step may have assigned new ones.

    There is one variable for all replicas. So all continue with the keys of the first replica, and
    each folds its own index in again. If no replica assigned new bits, the keys stay as before.

    Cost:
        One all-reduce of the words of the keys.
    """
    new = _words(after)
    if new.shape == _words(entered).shape and after.dtype == entered.dtype:
        written = jnp.any(new != _words(entered)).astype(jnp.uint32)
    else:
        written = jnp.uint32(1)
    is_first = jax.lax.axis_index(axes) == 0
    # The sum over replicas of which all but one hold 0 is a broadcast. The flag is part of the
    # same all-reduce.
    mine = jnp.where(is_first, new, 0)
    both = jax.lax.psum(jnp.concatenate([written.reshape(1), mine.reshape(-1)]), axes)
    first = both[1:].reshape(new.shape).astype(new.dtype)
    if new.shape == _words(before).shape and after.dtype == before.dtype:
        first = jnp.where(both[0] > 0, first, _words(before))
    return (
        jax.random.wrap_key_data(first, impl=jax.random.key_impl(after))
        if _is_typed(after)
        else first
    )


def _words(keys: Any) -> Any:
    return jax.random.key_data(keys) if _is_typed(keys) else keys


def _is_typed(keys: Any) -> bool:
    return bool(jax.dtypes.issubdtype(keys.dtype, jax.dtypes.prng_key))
