"""The loss scale of float16, and steps that it skips."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server import ParameterServerStrategy, WorkerStrategy
from jaxdist._strategies import Strategy
from jaxdist._validate import show
from jaxdist.errors import UnsupportedError
from jaxdist.fit._step.losses import CALLER

# The scale multiplies the loss of each example: 4096 is the 65536 of Flax for the mean of 16
# examples. With a scale of 1, a loss that is not finite is not the fault of the scale.
_FIRST = DynamicScale(scale=4096.0, minimum_scale=1.0)

_NO_MINIMUM = 1e-30


@called(CALLER)
def find_loss_scale(
    given: Any, dtype: Any, strategy: Strategy, module: nnx.Module
) -> DynamicScale | None:
    """Return the loss scale of `compile`; None for a dtype that needs none."""
    if dtype != jnp.float16:
        if given is None:
            return None
        raise refuse(
            f"loss_scale={show(given)} without mixed_precision='float16'.",
            "Only gradients in float16 need a loss scale: the other dtypes have the range of "
            "float32.",
            "Leave out loss_scale, or pass mixed_precision='float16'.",
        )
    if isinstance(strategy, (ParameterServerStrategy, WorkerStrategy)):
        raise refuse(
            "mixed_precision='float16' and parameter servers.",
            "A step whose gradients are not finite changes nothing, and servers update each "
            "variable as soon as its gradient comes.",
            "Pass mixed_precision='bfloat16', which needs no loss scale.",
            kind=UnsupportedError,
        )
    in_16_bits = [
        "/".join(map(str, path))
        for path, x in nnx.to_flat_state(nnx.state(module, nnx.Param))
        if getattr(x, "dtype", None) == jnp.float16
    ]
    if in_16_bits:
        raise refuse(
            f"mixed_precision='float16' and {len(in_16_bits)} parameter(s) in float16: "
            f"{', '.join(in_16_bits[:5])}.",
            "The layers compute in float16, and the parameters stay in float32: an update is often "
            "too small for float16.",
            "Make the module with param_dtype=jnp.float32.",
        )
    if given is not None and not isinstance(given, DynamicScale):
        raise refuse_type(
            f"loss_scale={show(given)}.",
            "It is a flax.training.dynamic_scale.DynamicScale.",
            "Pass for instance loss_scale=DynamicScale(growth_interval=500, minimum_scale=1.0).",
        )
    if given is None:
        return _FIRST
    _check_rule(given)
    return given


def _check_rule(given: DynamicScale) -> None:
    scale, least = float(given.scale), given.minimum_scale
    rules = {
        f"scale={scale}": math.isfinite(scale) and scale > 0,
        f"growth_factor={given.growth_factor}": given.growth_factor > 1,
        f"backoff_factor={given.backoff_factor}": 0 < given.backoff_factor < 1,
        f"growth_interval={given.growth_interval}": given.growth_interval >= 1,
        f"minimum_scale={least}": least is None or 0 < least <= scale,
    }
    wrong = [text for text, holds in rules.items() if not holds]
    if wrong:
        raise refuse(
            f"loss_scale with {' and '.join(wrong)}.",
            "The scale is finite and above 0 and at least minimum_scale, and growth_interval at "
            "least 1. growth_factor is above 1, and backoff_factor between 0 and 1.",
            "Pass for instance loss_scale=DynamicScale(growth_interval=500, minimum_scale=1.0).",
        )


class ScaledOptimizer(nnx.Optimizer[Any]):
    """An optimizer with the loss scale of float16, which is saved and restored with it.

    Args:
        module: The module whose parameters it updates.
        tx: The transformation.
        first: The first scale, and the rule by which it changes.
    """

    def __init__(
        self, module: nnx.Module, tx: optax.GradientTransformation, first: DynamicScale
    ) -> None:
        super().__init__(module, tx, wrt=nnx.Param)
        self.scale = nnx.OptState(jnp.asarray(first.scale, jnp.float32))
        self.finite_steps = nnx.OptState(jnp.asarray(first.fin_steps, jnp.int32))
        # Without arrays, which would be constants of the compiled step.
        self._rule = first.replace(scale=0.0, fin_steps=0)

    def unscale(self, grads: Any) -> tuple[Any, jax.Array]:
        """Return the gradients of the loss, and 1.0 if one of them is not finite."""
        scale = self.scale[...]
        grads = jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)
        are_finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        return grads, 1.0 - jnp.all(jnp.stack(are_finite)).astype(jnp.float32)

    def move(self, is_finite: jax.Array) -> jax.Array:
        """Change the scale by the rule of Flax; return whether it was at its minimum."""
        rule, scale = self._rule, self.scale[...]
        before = rule.replace(scale=scale, fin_steps=self.finite_steps[...])
        # `DynamicScale` looks at gradients: let it see one that is finite or not.
        slope = jnp.where(is_finite, 0.0, jnp.inf)
        after = before.value_and_grad(lambda x: slope * x)(jnp.zeros(())).dynamic_scale
        self.scale[...], self.finite_steps[...] = after.scale, after.fin_steps
        least = rule.minimum_scale
        # The default of Flax is the smallest float32, which takes a hundred skipped steps more.
        return scale <= (1.0 if least is None or least < _NO_MINIMUM else least)


def keep_state(module: nnx.Module, optimizer: ScaledOptimizer) -> Callable[[jax.Array], None]:
    """Return a function that restores the present state if its argument is true.

    Random streams continue in any case.
    """
    objects = (module, optimizer)
    before = [_read(x) for x in objects]

    def restore(is_skipped: jax.Array) -> None:
        for node, old in zip(objects, before, strict=True):
            # A forward pass may add variables.
            new = {path: value for path, value in _read(node).items() if path in old}
            chosen = {
                path: jax.tree.map(lambda n, o: jnp.where(is_skipped, o, n), value, old[path])
                for path, value in new.items()
            }
            nnx.update(node, nnx.from_flat_state(chosen))

    return restore


def _read(node: Any) -> dict[Any, Any]:
    """Return the values of the variables of an object, without random streams."""
    state = nnx.as_pure(nnx.state(node, nnx.Not(nnx.RngState)))
    return dict(nnx.to_flat_state(state))
