"""Queues of experts: which tokens of a group each expert takes, and how they go there and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Routed(NamedTuple):
    """The choices of the tokens of one group: t tokens, k choices, E experts, C slots of each.

    Attributes:
        weight: `[t, k]`, the weights of the chosen experts, which sum to 1 for each token.
        slot: `[t, k]`, where the token is for each choice, as `expert * C + place`. Numbers from
            `E * C` up are choices that are dropped.
        token: `[E, C]`, the token in each slot.
        is_taken: `[E, C]`, whether the slot was taken, or has a copy of a token.
        balance: The balance loss of the group.
        dropped: The number of choices that are dropped.
    """

    weight: jax.Array
    slot: jax.Array
    token: jax.Array
    is_taken: jax.Array
    balance: jax.Array
    dropped: jax.Array


# Note [Slots that no token takes]
# An expert computes all its slots, also those that no token takes. Their results are not read, so
# the gradients that come back to them are 0. But 0 times the derivative at such a row is nan where
# that is infinite: a norm or a logarithm of a row of zeros. The gradient of the expert's weights
# would be nan, and the loss would not show it. So such a slot has a copy of a token that the
# expert takes anyhow, the last one of its queue. If no token of the group chose the expert, it is
# the token that came nearest to it.


def find_logits(x: jax.Array, router: jax.Array) -> jax.Array:
    """Return the logits of all experts for tokens `[..., d]`."""
    # TPUs would round the factors to bfloat16, and experts would be chosen by that.
    return jnp.dot(x.astype(router.dtype), router, precision=jax.lax.Precision.HIGHEST)


def route(logits: jax.Array, *, top_k: int, capacity: int) -> Routed:
    """Choose the experts of each token of a group, and the slots that the tokens take.

    All first choices come before all second choices; among those, tokens come in their order.
    """
    tokens, experts = logits.shape
    choices = tokens * top_k
    probability = jax.nn.softmax(logits)
    # Of equal probabilities, `top_k` takes the one with the lower index.
    chosen, expert = jax.lax.top_k(probability, top_k)
    weight = chosen / chosen.sum(axis=-1, keepdims=True)

    wanted = expert.T.reshape(-1)
    order = jnp.argsort(wanted, stable=True)
    counts = jnp.zeros(experts, jnp.int32).at[wanted].add(1)
    first = jnp.cumsum(counts) - counts
    place = jnp.argsort(order) - first[wanted]
    # An index of its own for each choice that is dropped: see `unique_indices` below.
    outside = experts * capacity + jnp.arange(choices)
    slot = jnp.where(place < capacity, wanted * capacity + place, outside)

    # See Note [Slots that no token takes].
    places = jnp.arange(capacity)[None, :]
    count = counts[:, None]
    in_queue = jnp.clip(first[:, None] + jnp.minimum(places, count - 1), 0, choices - 1)
    nearest = jnp.argmax(probability, axis=0)[:, None]
    token = jnp.where(count > 0, order[in_queue] % tokens, nearest)

    share = jax.lax.stop_gradient(counts.astype(probability.dtype) / choices)
    balance = experts * jnp.sum(share * probability.mean(axis=0))
    return Routed(
        weight=weight,
        slot=slot.reshape(top_k, tokens).T,
        token=token,
        is_taken=places < count,
        balance=balance,
        dropped=jnp.sum(jnp.maximum(counts - capacity, 0)),
    )


def fill_slots(x: jax.Array, routed: Routed) -> jax.Array:
    """Return the rows `[E, C, d]` of the slots of one group."""
    rows = x[routed.token]
    return jnp.where(routed.is_taken[..., None], rows, jax.lax.stop_gradient(rows))


def read_slots(out: jax.Array, routed: Routed) -> jax.Array:
    """Return the weighted sum `[t, d]` of what the experts computed for each token of a group."""
    flat = out.reshape(-1, out.shape[-1])
    picked: Any = flat.at[routed.slot].get(mode="fill", fill_value=0, unique_indices=True)
    weight = routed.weight[..., None]
    return jnp.sum(picked.astype(weight.dtype) * weight, axis=1).astype(out.dtype)
