"""Text from the model: one compiled loop, and a cache of fixed length."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import partition
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist.jobs.topics_lm._attention import Cache
from jaxdist.jobs.topics_lm._model import Transformer

_Carry = tuple[jax.Array, list[Cache]]  # the byte to go on from, and what was seen before it


def next_bytes(
    model: Transformer,
    prompt: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    count: int,
    slots: int,
) -> jax.Array:
    """Continue a prompt; for use inside a replica, or without any.

    Shapes:
        In: the prompt `[p]`, one sequence of bytes. Out: `[count]`.

    Args:
        model: The model.
        prompt: Integers from 0 to 255, at least one.
        key: A random key; the same text comes from the same one.
        temperature: 0 takes the likeliest byte each time, 1 draws as the model says.
        count: How many bytes, static.
        slots: How many bytes the model looks back on, static; the length that it was trained
            with.
    """
    model = partition.gather(model)  # once, and not for each byte
    given = prompt.shape[0]
    total = given + count - 1
    forced = jnp.zeros(total + 1, jnp.int32).at[:given].set(prompt)

    def step(carry: _Carry, position: jax.Array) -> tuple[_Carry, jax.Array]:
        token, caches = carry
        logits, caches = model.step(token[None], caches, position)
        # The argmax of logits with Gumbel noise is a draw from their softmax.
        noise = jax.random.gumbel(jax.random.fold_in(key, position), logits[0].shape)
        drawn = jnp.argmax(logits[0] + temperature * noise).astype(jnp.int32)
        following = jnp.where(position + 1 < given, forced[position + 1], drawn)
        return (following, caches), following

    start = (forced[0], model.empty_caches(1, slots))
    _, followed = jax.lax.scan(step, start, jnp.arange(total))
    return followed[given - 1 :]


_STATIC = RunOptions(static_argnames=("count", "slots"))


def generate(
    strategy: Strategy,
    model: Transformer,
    prompt: str | bytes,
    num_bytes: int,
    *,
    context_length: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> bytes:
    """Continue a prompt, on the devices of a strategy.

    Cost:
        One program for each length of prompt and number of bytes, compiled once; in it one step
        for each byte, whose attention reads a cache of `context_length` positions. All replicas
        do the same.

    Args:
        strategy: Where the model lives.
        model: The model.
        prompt: What the text goes on from, at least one byte.
        num_bytes: How many bytes.
        context_length: How many bytes the model looks back on.
        temperature: 0 takes the likeliest byte each time, 1 draws as the model says.
        seed: What draws are made from.

    Returns:
        The bytes after the prompt.
    """
    tokens = np.frombuffer(prompt.encode() if isinstance(prompt, str) else prompt, np.uint8)
    if not num_bytes:
        return b""
    arguments = (
        model,
        tokens.astype(np.int32),
        jax.random.key(seed),
        np.float32(temperature),
        num_bytes,
        context_length,
    )
    drawn = strategy.run(next_bytes, arguments, options=_STATIC)
    return np.asarray(drawn).astype(np.uint8).tobytes()
