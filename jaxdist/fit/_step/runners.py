"""Runs the steps of `fit`: on all replicas together, or on workers that are not in step."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist._called import called
from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy
from jaxdist._program import RunOptions
from jaxdist._strategies import Strategy
from jaxdist._validate import log_without_effect
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
            why = "servers compute the new parameters after each step, so each is a function"
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
