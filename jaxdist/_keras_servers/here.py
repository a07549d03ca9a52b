"""Runs steps of a Keras model in this process, with weights from the servers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import called
from jaxdist._integers import check_all_fit
from jaxdist._keras import give_back_after_errors, take_batches


class FunctionHere:
    """A predict function, or a test function with a step of the user.

    Arrays that a step does not change stay the same objects, because new ones would be sent to
    the servers: see Note [Keras models on servers].

    Args:
        model: The Keras model.
        kind: "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self._model, self._kind = model, kind
        # The numbers of the arrays that the step changed in its last trace, by the batch's shapes.
        self._changed: dict[Any, list[int]] = {}
        eagerly = model.run_eagerly or not model.jit_compile
        self._step = self._compute if eagerly else jax.jit(self._compute)

    @called("evaluate or predict of Keras")
    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Run the next `steps_per_execution` steps; return the logs or outputs, and the state."""
        found = []
        with give_back_after_errors(self._model, self._kind, lambda: state):
            for batch in take_batches(self._model, iterator):
                check_all_fit("data", batch)
                result, new = self._step(state, batch)
                arrays, structure = jax.tree.flatten(state)
                for number, array in zip(self._changed[_describe(batch)], new, strict=True):
                    arrays[number] = array
                state = jax.tree.unflatten(structure, arrays)
                found.append(result)
        if self._kind != "predict":
            return found[-1], state
        if len(found) == 1:
            return found[0], state
        return jax.tree.map(lambda *x: jnp.concatenate(x), *found), state

    @_compat.check_constants()
    def _compute(self, state: Any, batch: Any) -> tuple[Any, list[Any]]:
        """Return the result of a step, and the arrays of the state that it changed."""
        result, new = getattr(self._model, f"{self._kind}_step")(state, batch)
        new = (state[0], new) if self._kind == "predict" else new
        pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True))
        changed = [n for n, (before, after) in enumerate(pairs) if after is not before]
        self._changed[_describe(batch)] = changed
        return result, [pairs[n][1] for n in changed]


def _describe(batch: Any) -> Any:
    leaves, structure = jax.tree.flatten(batch)
    # In a trace, dtypes are those of JAX.
    return structure, tuple((x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
