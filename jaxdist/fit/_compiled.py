"""Runs `compile`: makes the optimizer, the steps and their runner."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist._called import called, refuse, refuse_type
from jaxdist._strategies import Strategy
from jaxdist._validate import as_flag, as_integer, respell, show
from jaxdist.fit._step.losses import CALLER
from jaxdist.fit._step.output_losses import find_losses
from jaxdist.fit._step.output_metrics import find_output_metrics
from jaxdist.fit._step.runners import EvaluateStep, PredictStep, Runner, make_runner
from jaxdist.fit._step.steps import Steps

# Names and defaults as in Keras. The learning rate is in the state, so that it can change.
_OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.01),
    "adam": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.001, eps=1e-7),
    "adamw": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.001, eps=1e-7, weight_decay=0.004
    ),
    "rmsprop": lambda: optax.inject_hyperparams(optax.rmsprop)(
        learning_rate=0.001, decay=0.9, eps=1e-7
    ),
    "adagrad": lambda: optax.inject_hyperparams(optax.adagrad)(learning_rate=0.001, eps=1e-7),
}
_PRECISIONS = {None: None, "bfloat16": jnp.bfloat16, "mixed_bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of `compile`.

    Attributes:
        optimizer: The optimizer of the module.
        steps: The computation of one step inside a replica.
        runner: Runs the steps.
        steps_per_execution: How many steps are one dispatch.
        find_nonfinite: Whether to look for the first layer whose output is not finite.
        evaluate_step: One step of an evaluation.
        predict_step: One step of a prediction.
    """

    optimizer: "nnx.Optimizer[Any]"
    steps: Steps
    runner: Runner
    steps_per_execution: int
    find_nonfinite: bool
    evaluate_step: EvaluateStep
    predict_step: PredictStep


@called(CALLER)
def compile_model(
    module: nnx.Module,
    strategy: Strategy,
    *,
    optimizer: Any,
    loss: Any,
    loss_weights: Any,
    metrics: Any,
    weighted_metrics: Any,
    steps_per_execution: int,
    mixed_precision: str | None,
    gradient_accumulation_steps: int | None,
    find_nonfinite: bool,
) -> Compiled:
    """Check the arguments of `compile`, and make the parts that the steps need."""
    losses = find_losses(loss, loss_weights)
    plain = find_output_metrics("metrics", metrics, loss)
    weighted = find_output_metrics("weighted_metrics", weighted_metrics, loss)
    count = as_integer("steps_per_execution", steps_per_execution, least=1)
    is_looking = as_flag("find_nonfinite", find_nonfinite)
    if is_looking and count > 1:
        raise refuse(
            f"find_nonfinite=True and steps_per_execution={count}.",
            "find_nonfinite looks at the model between two steps, and these are one dispatch.",
            "Pass steps_per_execution=1 while you look.",
        )
    transform = _find_optimizer(optimizer)
    if gradient_accumulation_steps is not None:
        every = as_integer("gradient_accumulation_steps", gradient_accumulation_steps, least=2)
        transform = optax.MultiSteps(transform, every).gradient_transformation()
    steps = Steps(module, losses, plain, weighted, _find_dtype(mixed_precision))
    with strategy.scope():
        made = nnx.Optimizer(module, transform, wrt=nnx.Param)
    return Compiled(
        optimizer=made,
        steps=steps,
        runner=make_runner(strategy, steps, keeps_state=is_looking),
        steps_per_execution=count,
        find_nonfinite=is_looking,
        evaluate_step=EvaluateStep(steps),
        predict_step=PredictStep(steps),
    )


def make_predict_step(module: nnx.Module) -> PredictStep:
    """Return the prediction step of a model that is not compiled, and so can only predict."""
    return PredictStep(Steps(module, find_losses("mse", None), (), (), None))


@called(CALLER)
def _find_optimizer(optimizer: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise refuse(
                f"optimizer={optimizer!r}.",
                f"Optimizers with a name are {', '.join(_OPTIMIZERS)}.",
                "Pass one of these, or a transformation of optax: optax.adam(1e-3).",
            )
        return _OPTIMIZERS[optimizer]()
    if isinstance(optimizer, nnx.Optimizer) or not (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        raise refuse_type(
            f"optimizer={show(optimizer)}.",
            "optimizer is a transformation of optax; compile makes the nnx.Optimizer of the "
            "module.",
            "Pass for instance optimizer=optax.adam(1e-3).",
        )
    return optimizer


@called(CALLER)
def _find_dtype(name: Any) -> Any:
    if isinstance(name, str) and name in ("float16", "mixed_float16"):
        raise refuse(
            f"mixed_precision={name!r}.",
            "Gradients in float16 underflow without a loss scale, which jaxdist does not keep.",
            "Pass mixed_precision='bfloat16', which has the range of float32.",
        )
    found = respell(name, _PRECISIONS)
    if not isinstance(found, str | None) or found not in _PRECISIONS:
        raise refuse(
            f"mixed_precision={show(name)}.",
            "It is the dtype in which layers compute; parameters and losses stay in float32.",
            "Pass 'bfloat16' or None.",
        )
    return _PRECISIONS[found]
