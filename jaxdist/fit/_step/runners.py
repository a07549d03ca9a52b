"""How the steps of `fit` run: on all replicas together, or on workers that are not in step."""

import abc
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy
from jaxdist._strategies import Strategy
from jaxdist.fit._step.steps import Steps
from jaxdist.training import multi_step

# How many steps a worker may have in the queue: enough that it never waits, and few enough that
# Ctrl-C and the end of an epoch come soon.
_QUEUED = 4


# Functions of this module, with the steps as a static argument: `strategy.run` knows its programs
# by the function, and warns of functions that are made again and again.


def train_step(
    steps: Steps, module: nnx.Module, optimizer: "nnx.Optimizer[Any]", batch: Any, classes: Any
) -> jax.Array:
    """Run one step inside a replica."""
    return steps.train(module, optimizer, batch, classes)


def train_steps(
    steps: Steps, module: nnx.Module, optimizer: "nnx.Optimizer[Any]", batches: Any, classes: Any
) -> jax.Array:
    """Run several steps inside a replica, and return the sums of each, `[steps, n]`."""

    def run_one(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        return state, steps.train(state[0], state[1], batch, classes)

    return multi_step(run_one)((module, optimizer), batches)[1]


def evaluate_step(steps: Steps, module: nnx.Module, batch: Any, mask: jax.Array) -> jax.Array:
    """Evaluate one batch inside a replica."""
    return steps.evaluate(module, batch, mask)


def predict_step(steps: Steps, module: nnx.Module, batch: Any) -> Any:
    """Predict one batch inside a replica."""
    return steps.predict(module, batch)


class Runner(abc.ABC):
    """Runs training steps, and returns their sums later."""

    def __init__(self, strategy: Strategy, steps: Steps) -> None:
        self.strategy, self._steps = strategy, steps

    def train(self, module: Any, optimizer: Any, batches: Sequence[Any], classes: Any) -> Any:
        """Dispatch one step for each batch; what it returns is for `fetch`."""
        if len(batches) == 1:
            args = (self._steps, module, optimizer, batches[0], classes)
            return self._run(train_step, args)
        return self._run(train_steps, (self._steps, module, optimizer, list(batches), classes))

    @abc.abstractmethod
    def _run(self, step: Any, args: tuple[Any, ...]) -> Any: ...

    @abc.abstractmethod
    def fetch(self, output: Any) -> np.ndarray:
        """Return the sums of dispatched steps, `[n]` or `[steps, n]`. Waits for them."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until all dispatched steps have changed the model."""


class SynchronousRunner(Runner):
    """All replicas run each step together."""

    def _run(self, step: Any, args: tuple[Any, ...]) -> Any:
        return self.strategy.run(step, args)

    def fetch(self, output: Any) -> np.ndarray:
        return np.asarray(output)

    def wait(self) -> None:
        """Do nothing: a later step waits for the ones before it on the devices."""


class ServerRunner(Runner):
    """Workers take steps from the queue of a coordinator; variables are on servers."""

    def __init__(self, strategy: ParameterServerStrategy, steps: Steps) -> None:
        super().__init__(strategy, steps)
        self.coordinator = ClusterCoordinator(strategy)
        # Batches go to the workers with the steps, and evaluations run in this process.
        strategy._allow_work_here()
        self._most = _QUEUED * len(strategy.links())
        self._queued: deque[Any] = deque()
        own = steps

        def run_step(*args: Any) -> Any:
            return strategy.run(train_step, (own, *args))

        def run_steps(*args: Any) -> Any:
            return strategy.run(train_steps, (own, *args))

        self._scheduled = {train_step: run_step, train_steps: run_steps}

    def _run(self, step: Any, args: tuple[Any, ...]) -> Any:
        if len(self._queued) == self._most:
            self._queued.popleft().get()
        output = self.coordinator.schedule(self._scheduled[step], args[1:])
        self._queued.append(output)
        return output

    def fetch(self, output: Any) -> np.ndarray:
        return np.asarray(output.fetch())

    def wait(self) -> None:
        self._queued.clear()
        self.coordinator.join()


def make_runner(strategy: Strategy, steps: Steps) -> Runner:
    """Return the runner for a strategy."""
    if isinstance(strategy, ParameterServerStrategy):
        return ServerRunner(strategy, steps)
    return SynchronousRunner(strategy, steps)
