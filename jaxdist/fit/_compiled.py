"""The parts that `compile` makes: runners of steps, and an optimizer with its learning rate."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

from jaxdist._called import called, refuse, refuse_type
from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist._validate import as_integer, log_without_effect, respell, show
from jaxdist.errors import ArgumentError
from jaxdist.fit._step.loss_scale import ScaledOptimizer
from jaxdist.fit._step.losses import CALLER
from jaxdist.fit._step.output_losses import find_losses
from jaxdist.fit._step.steps import Steps
from jaxdist.training import multi_step

# How many steps of each worker may be queued: enough that it never waits, and so few that
# Ctrl-C and the end of an epoch come soon.
_QUEUED = 4


class _Step:
    """A function that `strategy.run` calls inside a replica.

    Each compiled model has its own object: `strategy.run` finds its programs by the object.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __repr__(self) -> str:
        return f"fit.Model, {type(self).__name__}"


class TrainStep(_Step):
    """One step of training."""

    def __call__(
        self, module: nnx.Module, optimizer: "nnx.Optimizer[Any]", batch: Any, classes: Any
    ) -> jax.Array:
        return self._steps.train(module, optimizer, batch, classes)


class TrainSteps(_Step):
    """Several steps of training; returns the sums of each, `[steps, n]`."""

    def __call__(
        self, module: nnx.Module, optimizer: "nnx.Optimizer[Any]", batches: Any, classes: Any
    ) -> jax.Array:
        def run_one(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            return state, self._steps.train(state[0], state[1], batch, classes)

        return multi_step(run_one)((module, optimizer), batches)[1]


class EvaluateStep(_Step):
    """The evaluation of one batch."""

    def __call__(self, module: nnx.Module, batch: Any, mask: jax.Array | None) -> jax.Array:
        return self._steps.evaluate(module, batch, mask)


class PredictStep(_Step):
    """The prediction of one batch."""

    def __call__(self, module: nnx.Module, batch: Any) -> Any:
        return self._steps.predict(module, batch)


class Runner:
    """Runs training steps on all replicas together, and returns their sums later.

    Args:
        strategy: The strategy.
        steps: The steps of the model.
        keeps_state: Whether the state before a step is needed after it. Otherwise the step reuses
            its memory.
    """

    def __init__(self, strategy: Strategy, steps: Steps, *, keeps_state: bool) -> None:
        self.strategy = strategy
        self._train_step, self._train_steps = TrainStep(steps), TrainSteps(steps)
        self._options = None if keeps_state else RunOptions(donate_argnums=(0, 1))

    def train(self, module: Any, optimizer: Any, batches: Sequence[Any], classes: Any) -> Any:
        """Dispatch one step for each batch; pass the result to `fetch`."""
        if len(batches) == 1:
            return self._run(self._train_step, (module, optimizer, batches[0], classes))
        return self._run(self._train_steps, (module, optimizer, list(batches), classes))

    def _run(self, step: Any, args: tuple[Any, ...]) -> Any:
        return self.strategy.run(step, args, options=self._options)

    def fetch(self, output: Any) -> np.ndarray:
        """Return the sums of dispatched steps, `[n]` or `[steps, n]`. Waits for them."""
        return np.asarray(output)

    def wait(self) -> None:
        """Wait until all dispatched steps have changed the model.

        On the devices, each step waits for the ones before it.
        """


class ServerRunner(Runner):
    """Workers take steps from the queue of a coordinator; variables are on servers."""

    def __init__(self, strategy: ParameterServerStrategy, steps: Steps) -> None:
        super().__init__(strategy, steps, keeps_state=True)
        self.coordinator = ClusterCoordinator(strategy)
        # Batches go to the workers with the steps, and this process runs evaluations.
        strategy._allow_work_here()
        self._servers = strategy
        self._queued: deque[Any] = deque()
        run_one = self._train_step

        def train_step(*args: Any) -> Any:
            return strategy.run(run_one, args)

        self._scheduled_step = train_step

    @called("fit.Model.compile")
    def train(self, module: Any, optimizer: Any, batches: Sequence[Any], classes: Any) -> Any:
        if len(batches) > 1:
            why = "servers compute the new parameters after each step, so each step is a function"
            log_without_effect("steps_per_execution", why)
        outputs = [
            self._run(self._scheduled_step, (module, optimizer, batch, classes))
            for batch in batches
        ]
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, step: Any, args: tuple[Any, ...]) -> Any:
        # Workers may join while the training runs.
        if len(self._queued) >= _QUEUED * len(self._servers.links()):
            self._queued.popleft().get()
        output = self.coordinator.schedule(step, args)
        self._queued.append(output)
        return output

    def fetch(self, output: Any) -> np.ndarray:
        if isinstance(output, list):
            return np.stack([np.asarray(one.fetch()) for one in output])
        return np.asarray(output.fetch())

    def wait(self) -> None:
        self._queued.clear()
        self.coordinator.join()


def make_runner(strategy: Strategy, steps: Steps, *, keeps_state: bool) -> Runner:
    """Return the runner for a strategy."""
    if isinstance(strategy, ParameterServerStrategy):
        return ServerRunner(strategy, steps)
    return Runner(strategy, steps, keeps_state=keeps_state)


_NAME = "learning_rate"

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
_PRECISIONS = {
    None: None,
    "bfloat16": jnp.bfloat16,
    "mixed_bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "mixed_float16": jnp.float16,
}


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


@called("fit.Model.predict")
def make_predict_step(module: nnx.Module) -> PredictStep:
    """Return the prediction step of a model that is not compiled, and so can only predict."""
    return PredictStep(Steps(module, find_losses("mse", None), (), (), None))


@called(CALLER)
def make_optimizer(
    module: nnx.Module, transform: optax.GradientTransformation, scale: DynamicScale | None
) -> "nnx.Optimizer[Any]":
    """Return the optimizer of a module, with a loss scale if one is given.

    Raises:
        ArgumentError: The transformation does not take the parameters of this module.
    """
    try:
        if scale is not None:
            return ScaledOptimizer(module, transform, scale)
        return nnx.Optimizer(module, transform, wrt=nnx.Param)
    except (ValueError, TypeError) as error:
        raise refuse(
            f"an optimizer that does not take the parameters of {type(module).__name__}: {error}",
            "Its masks and labels have the structure of the parameters, which are an nnx.State.",
            "Pass them as functions, for instance optax.masked(transform, lambda params: "
            "jax.tree.map(lambda p: p.ndim > 1, params)).",
        ) from error


@called(CALLER)
def make_transformation(optimizer: Any, accumulated: int | None) -> optax.GradientTransformation:
    """Return the transformation of an optimizer, for the mean of several gradients if given."""
    transform = _find_optimizer(optimizer)
    if accumulated is None:
        return transform
    every = as_integer("gradient_accumulation_steps", accumulated, least=2)
    return optax.MultiSteps(transform, every).gradient_transformation()


@called(CALLER)
def _find_optimizer(optimizer: Any) -> optax.GradientTransformation:
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise refuse(
                f"optimizer={optimizer!r}.",
                f"The names of optimizers are {', '.join(_OPTIMIZERS)}.",
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
def find_dtype(name: Any) -> Any:
    found = respell(name, _PRECISIONS)
    if not isinstance(found, str | None) or found not in _PRECISIONS:
        raise refuse(
            f"mixed_precision={show(name)}.",
            "It is the dtype in which layers compute; parameters and losses stay in float32.",
            "Pass 'bfloat16', 'float16' or None.",
        )
    return _PRECISIONS[found]


def _find_all(state: Any) -> Iterator[Any]:
    """Yield all parts of the state of an optimizer that have a learning rate."""
    hyperparams = getattr(state, "hyperparams", None)
    if hyperparams is not None and _NAME in hyperparams:
        yield state
        return
    if hasattr(state, "_fields"):
        children: Any = (getattr(state, name) for name in state._fields)
    elif isinstance(state, (tuple, list)):
        children = state
    elif isinstance(state, dict):
        children = state.values()
    else:
        return
    for child in children:
        yield from _find_all(child)


def _find(optimizer: "nnx.Optimizer[Any]") -> Any:
    """Return the part of the state with the learning rate.

    Raises:
        ArgumentError: The learning rate is not in the optimizer's state.
    """
    found = list(_find_all(optimizer.opt_state))
    if len(found) != 1:
        raise ArgumentError(
            f"The learning rate of the optimizer cannot be read or set: its state has {len(found)} "
            "learning rates.\n\n"
            "optax keeps a learning rate in the state only with inject_hyperparams; otherwise it "
            "is a constant of the compiled step.\n\n"
            "Pass an optimizer by name, such as 'adam', or "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        )
    return found[0]


def get_rate(optimizer: "nnx.Optimizer[Any]") -> float:
    """Return the learning rate."""
    return float(jax.device_get(_find(optimizer).hyperparams[_NAME][...]))


def set_rate(optimizer: "nnx.Optimizer[Any]", rate: float) -> None:
    """Set the learning rate of the next steps.

    Raises:
        ArgumentError: The learning rate is not in the optimizer's state, or a schedule sets it.
    """
    state = _find(optimizer)
    if _NAME in getattr(state, "hyperparams_states", {}):
        raise refuse(
            f"learning_rate={rate}, and a schedule of optax sets it.",
            "A schedule computes the learning rate in each step, so this one would not be used.",
            "Give the optimizer a number: "
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3).",
        )
    variable = state.hyperparams[_NAME]
    old = variable[...]
    # Keep the dtype and placement, so that no step is compiled again.
    new = jnp.asarray(rate, old.dtype)
    variable.set_value(jax.device_put(new, old.sharding))
