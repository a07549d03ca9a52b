"""Random keys that depend on the example but not on its replica."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import current_log
from jaxdist._validate import as_integer, show
from jaxdist.errors import ContextError, ShapeError

# Generators of JAX that draw the numbers of several keys under `jax.vmap` from the first of them.
_OF_NEIGHBOURS = ("rbg", "unsafe_rbg")


@called("nn.example_keys")
def example_keys(key: jax.Array, num_local_examples: int) -> jax.Array:
    """Return one random key for each example of this replica, by its index in the global batch.

    Dropout that draws from these keys, one example at a time, drops the same units on any
    number of replicas.

    Shapes:
        In: one key. Out: keys `[b]` (`[b, 2]` for raw keys). Replica `r` gets the keys of the
        global examples `r*b` to `(r+1)*b - 1`. If replicas have different numbers of rows, its
        first example follows the rows of the replicas before it.

    Cost:
        `b` hashes; no collective.

    Guarantees:
        Row `i` of the global batch gets `jax.random.fold_in(key, i)`, on every number of
        replicas, in uneven steps too, and outside of every strategy.

    Args:
        key: The same key on all replicas, and a new one for each step:
            `jax.random.fold_in(key, step)`. A key that a step draws from `nnx.Rngs` is not
            suitable, since every replica draws a different one.
        num_local_examples: Number of rows `b` of this replica's batch.

    Raises:
        ArgumentTypeError: `key` is not a random key, or `num_local_examples` is not an integer.
        ShapeError: `key` is an array of several keys, or a raw key of another generator.
        ArgumentError: `num_local_examples` is negative, or the key is of `"rbg"` or
            `"unsafe_rbg"`, whose numbers under `jax.vmap` depend on the other keys.
        ContextError: In a strategy's scope or a merge function.

    Example:
        >>> def step(key, x):
        ...     keys = jaxdist.nn.example_keys(key, x.shape[0])
        ...     return jax.vmap(jax.random.bernoulli)(keys)
        >>> key, x = jax.random.key(0), np.zeros(8)
        >>> many = MirroredStrategy()
        >>> flags = many.run(step, (key, jax.device_put(x, many.per_replica_sharding)))
        >>> one = OneDeviceStrategy("cpu:0").run(step, (key, x))
        >>> np.array_equal(flags.array, one)
        True
    """
    is_typed = _check_key(key)
    as_integer(
        "num_local_examples",
        num_local_examples,
        least=0,
        most=(1 << 31) - 1,
        remedy="Pass x.shape[0] of this replica's batch; it is a Python integer, as in all shapes.",
    )
    frame = _replica.current_frame()
    if frame is not None and frame.replica is None:
        raise ContextError(
            f"nn.example_keys was called {frame.describe()}.\n\n"
            "It numbers the examples of one replica, so it is called inside a replica.\n\n"
            "Call it inside the function that you pass to strategy.run."
        )
    # Outside of every strategy the batch is the global one.
    first: Any = 0
    if frame is not None and frame.replica is not None:
        first = _count_examples_before(frame.replica.replica_id_in_sync_group, num_local_examples)
    examples = first + jnp.arange(num_local_examples)
    if not num_local_examples:
        return key[None][:0] if is_typed else key.reshape(1, -1)[:0]
    # `fold_in`, not `split`: a key must depend only on its index, not on the number of keys.
    keys: jax.Array = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, examples)
    return keys


def _count_examples_before(replica_id: Any, num_local: int) -> Any:
    """Return the number of examples on the replicas before this one."""
    log = current_log()
    if log is None:
        return replica_id * num_local
    # In an uneven step each replica is traced with its own `num_local`, and the log has the numbers
    # of all replicas, so the sum needs no collective.
    rows = log.next(num_local)
    return jnp.asarray([sum(rows[:r]) for r in range(len(rows))])[replica_id]


def _check_key(key: Any) -> bool:
    """Check that `key` is one random key, and return whether its dtype is typed.

    Raw keys are vectors of two or more uint32 words.
    """
    dtype = getattr(key, "dtype", None)
    is_typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and dtype != jnp.uint32:
        raise refuse_type(
            f"key={show(key)}.",
            "key is a random key of JAX.",
            "Pass jax.random.key(seed), or one made from it.",
        )
    if jnp.ndim(key) != (0 if is_typed else 1):
        raise refuse(
            f"key with the shape {list(key.shape)}.",
            "It takes one key, and folds the number of each example into it.",
            "Pass one key, for instance jax.random.key(seed).",
            kind=ShapeError,
        )
    if not is_typed:
        _check_words(key)
    impl = str(jax.random.key_impl(key))
    if impl in _OF_NEIGHBOURS:
        raise refuse(
            f"key of the random number generator {impl!r}.",
            "Under jax.vmap it draws the numbers of all keys from the first one, so they would "
            "depend on how rows are divided over replicas and micro-batches.",
            "Pass jax.random.key(seed, impl='threefry2x32').",
        )
    return is_typed


def _check_words(key: Any) -> None:
    """Check that a raw key is one of JAX's default generator."""
    words = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape
    if key.shape != words:
        raise refuse(
            f"key uint32{list(key.shape)}.",
            f"A raw key has {words[0]} words, by the generator jax_default_prng_impl="
            f"{jax.random.key_impl(jax.random.key(0))!r}.",
            "Pass jax.random.key(seed), which knows its generator.",
            kind=ShapeError,
        )
