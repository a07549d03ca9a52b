"""Steps of a Keras model that this process runs, with the weights that it has got from servers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._keras import check_interrupt


class FunctionHere:
    """A predict function, or a test function with a step of the user.

    Args:
        model: The Keras model.
        kind: "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self._kind = model, kind
        written = getattr(model, f"{kind}_step")
        self._step = written if model.run_eagerly or not model.jit_compile else jax.jit(written)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next `steps_per_execution` steps; return the logs or outputs, and the state."""
        check_interrupt()
        found = []
        for n in range(self._model.steps_per_execution):
            batch = next(iterator) if n == 0 else next(iterator, None)
            if batch is None:
                break
            result, new = self._step(state, batch)
            # The arrays of weights stay the same objects: they are those that the servers have.
            state = (state[0], new) if self._kind == "predict" else (state[0], *new[1:])
            found.append(result)
        if self._kind != "predict":
            return found[-1], state
        if len(found) == 1:
            return found[0], state
        return jax.tree.map(lambda *x: jnp.concatenate(x), *found), state
