"""A dependence between collectives, so that XLA does not combine them.

# Note [Collectives that stay apart]
XLA combines all-reduces over equal replica groups into one. That would undo the packs and shards
that an option asks for. jaxdist keeps them apart in two ways:
- Packs: the operands of each all-reduce depend on the result of the one before (`order_after`).
- Shards: each all-reduce lists the replicas of its groups from another first member (`rotate`), and
  XLA combines only groups that are listed in the same order. This needs no dependence, so shards
  can run at the same time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxdist import _compat


def order_after(before: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the operands unchanged, but available only after all of `before` are computed."""
    if _compat.KEEPS_BARRIERS:
        held = jax.lax.optimization_barrier((*operands, *before))
        return list(held[: len(operands)])
    # JAX 0.10: XLA drops barriers before it combines all-reduces. So the operands depend on
    # `before` by a `where` whose condition is always False, and XLA cannot prove that.
    never = jnp.zeros((), bool)
    for total in before:
        # Without `stop_gradient`, the derivative of this step would add operations on `before`.
        never = never | _make_false(jax.lax.stop_gradient(total))
    return [jnp.where(never, jnp.zeros_like(x), x) for x in operands]


def _make_false(array: jax.Array) -> jax.Array:
    """Return False, computed from an array in a way that XLA cannot simplify."""
    if not array.size:
        return jnp.zeros((), bool)
    first = array.ravel()[0]
    if jnp.issubdtype(first.dtype, jnp.integer):
        # The remainder of a square by 4 is 0 or 1, also after overflow. XLA does not know that.
        return (first * first) % 4 == 2
    # No number is both nan and infinite.
    first = first.real
    return jnp.isnan(first) & jnp.isinf(first)
