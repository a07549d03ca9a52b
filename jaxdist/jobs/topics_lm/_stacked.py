"""Stacks layers into one array for each parameter, so that a scan can run them."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


def stack(make: Callable[[nnx.Rngs], M], count: int, rngs: nnx.Rngs) -> M:
    """Return one layer that has the parameters of `count` layers, in a new dim 0.

    The parameters are those that `count` calls of `make(rngs)` would draw one after another.
    """
    graphdef, before = nnx.split(rngs)
    advanced = nnx.clone(rngs)
    made = make(advanced)
    after = nnx.state(advanced)

    def advance(number: Any) -> Any:
        """Return the state of the random streams before a layer."""

        # Streams count their draws, and each layer draws equally often. Their keys stay the same.
        def add(start: Any, end: Any) -> Any:
            is_count = jnp.issubdtype(start.dtype, jnp.integer)
            return start + (number * (end - start)).astype(start.dtype) if is_count else start

        return jax.tree.map(add, before, after)

    # One trace, for any number of layers.
    numbers = jnp.arange(count)
    nnx.update(made, jax.vmap(lambda n: nnx.state(make(nnx.merge(graphdef, advance(n)))))(numbers))
    nnx.update(rngs, advance(jnp.asarray(count)))
    for _, variable in nnx.iter_graph(made):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(stacked_layers=True)
    return made


def take(layers: M, number: int) -> M:
    """Return one of stacked layers, outside of a scan."""
    graphdef, state = nnx.split(layers)
    made: M = nnx.merge(graphdef, jax.tree.map(lambda w: w[number], state))
    return made
