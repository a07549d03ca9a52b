"""The loop of `Estimator.train`."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxdist._called import refuse
from jaxdist._parameter_server import WorkerStrategy
from jaxdist._replica import ReplicaContext
from jaxdist._strategies import Strategy, get_replica_context
from jaxdist.data import InputOptions, PartialBatch
from jaxdist.errors import ShapeError
from jaxdist.estimator._hooks import (
    CheckpointSaverListener,
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    call_each,
)
from jaxdist.estimator._model.building import build
from jaxdist.estimator._model.model_fn import InputFn, open_input, split_batch, take_local
from jaxdist.estimator._model.spec import ModeKeys
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._running.folder import ModelFolder, WarmStartSettings, warm_start
from jaxdist.estimator._running.progress import Losses, Progress
from jaxdist.estimator._running.state import Saver, TrainState

_LOG = logging.getLogger("jaxdist")

# How often the processes exchange requests to stop or save: one exchange per step would cost more
# than the step.
_EVERY = 10


class Agreement:
    """Decisions that the processes of a strategy make together: to stop, or to save by the clock.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # Workers of servers are not in step with each other.
        self.is_needed = not isinstance(strategy, WorkerStrategy) and count_processes(strategy) > 1

    def decide(self, step: int, wish: bool) -> bool:
        """Return whether any process wishes it; always False between exchanges.

        Args:
            step: How many steps this call of `train` has taken; the same in all processes.
            wish: Whether this process wishes it.
        """
        if not self.is_needed:
            return wish
        if step % _EVERY:
            return False
        given = self._strategy.experimental_distribute_values_from_function(
            lambda context: np.int32(wish)
        )
        return bool(np.asarray(self._strategy.run(_find_most, (given,))) > 0)


def _find_most(wish: Any) -> Any:
    context: ReplicaContext = get_replica_context()
    return context.all_reduce("sum", wish)


def count_processes(strategy: Strategy) -> int:
    """Return how many processes have devices of a strategy."""
    return len(set(strategy.layout.replica_owners))


_STEPS_OF_OTHERS = 4


@dataclasses.dataclass(frozen=True)
class Training:
    """The model to train, and how to train it.

    Args:
        call: Calls the model function with features and labels.
        strategy: The strategy.
        input_fn: Makes the dataset.
        folder: The checkpoints of the model.
        config: Settings of the training.
        hooks: The hooks of every worker.
        listeners: The listeners of the chief.
        steps: How many steps this worker takes; None for no limit.
        max_steps: The total of steps of all workers at the end; None for no limit.
        warm_start: Where a new model takes its initial values from; None for nowhere.
    """

    call: Callable[[Any, Any], Any]
    strategy: Strategy
    input_fn: InputFn
    folder: ModelFolder
    config: RunConfig
    hooks: Sequence[SessionRunHook]
    listeners: Sequence[CheckpointSaverListener]
    steps: int | None
    max_steps: int | None
    warm_start: WarmStartSettings | None

    @property
    def is_shared(self) -> bool:
        """Whether variables are on servers, where other workers change them too."""
        return isinstance(self.strategy, WorkerStrategy) and self.config.has_cluster

    @property
    def is_chief(self) -> bool:
        """Whether this process saves checkpoints and summaries."""
        return bool(self.strategy.extended.should_checkpoint)


def run_training(training: Training) -> None:
    """Train, and save the last step.

    Raises:
        ShapeError: The dataset does not have a batch for each replica.
        NonFiniteLossError: The loss is not finite.
    """
    strategy = training.strategy
    saver = Saver(training.folder, training.listeners)
    call_each(training.hooks, "begin")
    if training.is_chief:
        saver.begin()
    with _open_input(training) as batches:
        first = next(batches, None)
        if first is None:
            replicas = strategy.num_replicas_in_sync
            raise refuse(
                f"input_fn, whose dataset does not have a batch for each of {replicas} replica(s).",
                "Each element of the dataset is the batch of one replica, and a last step with "
                "fewer batches than replicas is left out.",
                f"Let input_fn return a dataset with at least {replicas} element(s).",
                kind=ShapeError,
            )
        state = _make_state(training, take_local(strategy, first))
        _Loop(training, state, saver).run(first, batches)


def _open_input(training: Training) -> Any:
    # A mean over a batch that only some replicas have would weight its rows differently.
    is_one = training.strategy.num_replicas_in_sync == 1
    policy = PartialBatch.UNEVEN if is_one else PartialBatch.DROP
    options = InputOptions(partial_batch=policy)
    return open_input(training.strategy, training.input_fn, options)


def _make_state(training: Training, batch: Any) -> TrainState:
    features, labels = split_batch(batch)
    seed = training.config.tf_random_seed or 0
    built = build(training.call, ModeKeys.TRAIN, training.strategy, features, labels, seed)
    latest = training.folder.find_latest()
    if latest is None:
        if training.warm_start is not None:
            warm_start(training.warm_start, built)
    elif training.is_chief or not training.is_shared:
        # The other workers read the chief's values from the servers.
        latest, _ = latest.follow(lambda choice: choice.restore(built.state))
        _LOG.info("Estimator.train continues from %s.", latest.path)
    return TrainState(built, latest, is_shared=training.is_shared)


class _Loop:
    """The steps of one call of `train`."""

    def __init__(self, training: Training, state: TrainState, saver: Saver) -> None:
        self._training, self._state, self._saver = training, state, saver
        config = training.config
        self._losses = Losses()
        self._progress = Progress(training.folder.path, config, is_chief=training.is_chief)
        self._agreement = Agreement(training.strategy)
        self._session = Session(state.built.modules, lambda: state.step, state.stop_all)
        # If processes are in step, all of them take part in a save.
        self._saves = training.is_chief or self._agreement.is_needed
        self._own = 0
        self._hooks = list(training.hooks)

    def run(self, batch: Any, batches: Iterator[Any]) -> None:
        training, state = self._training, self._state
        spec = state.built.spec
        own = [spec.training_hooks or ()]
        if training.is_chief:
            own.append(spec.training_chief_hooks or ())
        for hooks in own:
            call_each(hooks, "begin")
            self._hooks += hooks
        with (
            contextlib.closing(self._progress),
            self._saver.open(self._session) if self._saves else contextlib.nullcontext(),
        ):
            context = SessionRunContext(self._session)
            call_each(self._hooks, "after_create_session", self._session, context)
            if self._saves:
                self._saver.save_first(state)
            if not self._is_complete(state.read_step()):
                self._take_steps(context, batch, batches)
            self._losses.check_all()
            self._progress.finish(state.step)
            state.tell_end(training.config)
            if self._saves:
                self._saver.end(state)
            call_each(self._hooks, "end", self._session)

    def _take_steps(self, context: SessionRunContext, batch: Any, batches: Iterator[Any]) -> None:
        """Take steps until the last one, or until the data ends."""
        state = self._state
        while True:
            call_each(self._hooks, "before_run", context)
            values = self._take_step(batch)
            if self._saves and self._is_save_due():
                self._losses.check_all()
                self._progress.flush()
                if self._saver.save(state):
                    context.request_stop()
            call_each(self._hooks, "after_run", context, values)
            if self._agreement.decide(self._own, context.should_stop()) or state.is_stopped:
                return
            if self._is_near_end():
                state.read_step()
            if self._is_complete(state.step):
                return
            batch = next(batches, None)
            if batch is None:
                state.wait_for_workers(self._training.config)
                return

    def _take_step(self, batch: Any) -> SessionRunValues:
        features, labels = split_batch(batch)
        loss, step = self._state.run_step(features, labels)
        self._own += 1
        self._losses.add(self._state.step, loss)
        self._progress.note(self._state.step, loss)
        return SessionRunValues({"loss": loss, "global_step": step})

    def _is_save_due(self) -> bool:
        config = self._training.config
        if config.save_checkpoints_steps is not None:
            return self._saver.is_due_by_step(self._state.step, config.save_checkpoints_steps)
        if config.save_checkpoints_secs is None:
            return False
        return self._agreement.decide(
            self._own, self._saver.is_due_by_time(config.save_checkpoints_secs)
        )

    def _is_near_end(self) -> bool:
        """Whether other workers may have reached the last step.

        The step that this worker sees is from its own last change. Reading a newer one costs an
        exchange, and makes the worker read all variables again.
        """
        most = self._training.max_steps
        margin = _STEPS_OF_OTHERS * self._training.config.num_worker_replicas
        return most is not None and self._state.step >= most - margin

    def _is_complete(self, step: int) -> bool:
        steps, most = self._training.steps, self._training.max_steps
        return (steps is not None and self._own >= steps) or (most is not None and step >= most)
