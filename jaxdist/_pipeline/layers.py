"""The layers of one chunk and their backward, traced once and run in many ticks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun

from jaxdist._pipeline.halves import Halves, divide
from jaxdist._pipeline.inputs import Leaves, merge, pick
from jaxdist._pipeline.model import Model


class Layers:
    """Runs consecutive layers forward and backward.

    The forward returns its residuals. Those that are parameters are not kept: the backward reads
    them where they are. `jax.checkpoint` is the layer's own, and decides what else is kept.

    Args:
        model: The functions of the model.
        of_w: Which parameters have gradients: stacks of layers, then arrays that all layers use.
        w: Shapes and dtypes of these.
        stacks: How many of them are stacks.
        keys: Shapes and dtypes of the keys of a micro-batch.
        of_layers: The factor of the layers' own losses.

    Attributes:
        kept_avals: The residuals that are kept.
    """

    def __init__(
        self,
        model: Model,
        of_w: Sequence[bool],
        w: Leaves,
        stacks: int,
        keys: Leaves,
        of_layers: float,
    ) -> None:
        floats = model.x_floats
        trees: list[Any] = []

        def forward(w: Leaves, x: Leaves, keys: Leaves, first: Any) -> tuple[Leaves, Any, Leaves]:
            def run(chosen: Leaves, chosen_x: Leaves) -> tuple[Any, Leaves]:
                every = merge(chosen, w, of_w)
                y, losses = model.run_layers(
                    every[:stacks], every[stacks:], merge(chosen_x, x, floats), keys, first
                )
                return (pick(y, floats), losses), pick(y, [not f for f in floats])

            (y, losses), pull, others = jax.vjp(run, pick(w, of_w), pick(x, floats), has_aux=True)
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            y, others = iter(y), iter(others)
            return [next(y if f else others) for f in floats], losses, residuals

        first = jax.ShapeDtypeStruct((), jnp.int32)
        self._forward, results = jax.make_jaxpr(forward, return_shape=True)(
            w, model.x_avals, keys, first
        )
        self._tree = jax.tree.structure(results)
        y, losses, residuals = results
        variables = self._forward.jaxpr.invars[: len(w)]
        parameters = {v: n for n, v in enumerate(variables)}
        outvars = self._forward.jaxpr.outvars[len(self._forward.jaxpr.outvars) - len(residuals) :]
        # For each residual the number of the parameter that it is, or None.
        self._sources = [None if isinstance(v, Literal) else parameters.get(v) for v in outvars]
        self._is_kept = [source is None for source in self._sources]
        self.kept_avals = pick(residuals, self._is_kept)

        def backward(residuals: Leaves, g_y: Leaves) -> Any:
            pull = jax.tree.unflatten(trees[0], residuals)
            return pull((g_y, None if losses is None else jnp.full((), of_layers, losses.dtype)))

        self._backward = jax.make_jaxpr(backward)(residuals, pick(y, floats))
        self._num_w = sum(of_w)

    def run(self, w: Leaves, x: Leaves, keys: Leaves, first: Any) -> tuple[Leaves, Any, Leaves]:
        """Return the output, the layers' own losses, and the residuals that are kept."""
        found = jaxpr_as_fun(self._forward)(*w, *x, *keys, jnp.asarray(first, jnp.int32))
        y, losses, residuals = jax.tree.unflatten(self._tree, found)
        return y, losses, pick(residuals, self._is_kept)

    def pull(self, w: Leaves, kept: Leaves, g_y: Leaves) -> tuple[Leaves, Leaves]:
        """Return the gradients of the wanted parameters, and that of the input."""
        found = jaxpr_as_fun(self._backward)(*self._join(w, kept), *g_y)
        return found[: self._num_w], found[self._num_w :]

    @functools.cached_property
    def _halves(self) -> Halves:
        """The backward in two parts, the second of which reads the residuals again."""
        num_g = len(self._backward.in_avals) - len(self._sources)
        needed = [n >= self._num_w for n in range(len(self._backward.out_avals))]
        return divide(self._backward, needed, [True] * len(self._sources) + [False] * num_g)

    @functools.cached_property
    def saved_avals(self) -> Leaves:
        """What the first part saves for the second."""
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._backward.in_avals]
        return jax.eval_shape(lambda *operands: self._halves.first(operands)[1], *inputs)

    def pull_input(self, w: Leaves, kept: Leaves, g_y: Leaves) -> tuple[Leaves, Leaves, Leaves]:
        """Return gradients of parameters, with None for later ones; of the input; what is saved."""
        found, saved = self._halves.first([*self._join(w, kept), *g_y])
        return found[: self._num_w], found[self._num_w :], saved

    def pull_weights(self, w: Leaves, kept: Leaves, saved: Leaves) -> Leaves:
        """Return the gradients of parameters that `pull_input` does not, else None."""
        num_g = len(self._backward.in_avals) - len(self._sources)
        found = self._halves.second([*self._join(w, kept), *[None] * num_g], saved)
        return found[: self._num_w]

    def _join(self, w: Leaves, kept: Leaves) -> Leaves:
        """Return all residuals: the parameters, and those that were kept."""
        rest = iter(kept)
        return [next(rest) if source is None else w[source] for source in self._sources]
