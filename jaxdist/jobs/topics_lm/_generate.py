"""Generates text: one compiled loop, with a cache of fixed length."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import RunOptions, Strategy, partition
from jaxdist.jobs.topics_lm._attention import Cache
from jaxdist.jobs.topics_lm._model import Transformer
from jaxdist.jobs.topics_lm._text import VOCABULARY

_Carry = tuple[jax.Array, list[Cache]]  # the current byte, and the caches of the bytes before it


def next_bytes(
    model: Transformer,
    prompt: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    count: int,
    slots: int,
) -> jax.Array:
    """Continue a prompt, inside a replica or without a strategy.

    Shapes:
        In: the prompt `[p]`, one sequence of bytes. Out: `[count]`.

    Args:
        model: The model.
        prompt: Integers from 0 to 255, at least one.
        key: A random key. The same key gives the same text.
        temperature: 0 takes the most likely byte; 1 samples from the model's distribution.
        count: The number of bytes, static.
        slots: The number of earlier bytes that the model attends to, static: the length of its
            training windows.
    """
    # Gather sharded parameters once here, not in each iteration of the scan.
    model = partition.gather(model)
    given = prompt.shape[0]
    total = given + count - 1
    forced = jnp.zeros(total + 1, jnp.int32).at[:given].set(prompt)

    def step(carry: _Carry, position: jax.Array) -> tuple[_Carry, jax.Array]:
        token, caches = carry
        logits, caches = model.step(token[None], caches, position)
        # A larger vocabulary has entries that are not bytes.
        logits = logits[:, :VOCABULARY]
        # The argmax of logits plus Gumbel noise is a sample of their softmax. At temperature 0 it
        # is the plain argmax, without a second program.
        noise = jax.random.gumbel(jax.random.fold_in(key, position), logits[0].shape)
        drawn = jnp.argmax(logits[0] + temperature * noise).astype(jnp.int32)
        # Inside the prompt, the next byte is given. One scan covers prompt and generation, so one
        # program is enough.
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
        One compilation for each pair of prompt length and number of bytes. The program takes one
        step for each byte; its attention reads a cache of `context_length` positions. All replicas
        compute the same.

    Args:
        strategy: The strategy of the model.
        model: The model.
        prompt: The start of the text, at least one byte.
        num_bytes: The number of bytes to generate.
        context_length: The number of earlier bytes that the model attends to.
        temperature: 0 takes the most likely byte; 1 samples from the model's distribution.
        seed: The seed of the samples.

    Returns:
        The bytes after the prompt.
    """
    tokens = np.frombuffer(prompt.encode() if isinstance(prompt, str) else prompt, np.uint8)
    if not num_bytes:
        return b""
    arguments = (
        model,
        # All replicas continue the same prompt.
        jax.device_put(tokens.astype(np.int32), strategy.replicated_sharding),
        jax.random.key(seed),
        np.float32(temperature),
        num_bytes,
        context_length,
    )
    drawn = strategy.run(next_bytes, arguments, options=_STATIC)
    return np.asarray(drawn).astype(np.uint8).tobytes()
