"""A model in training, with its global step and its step on the replicas, and its saver."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist._processes import get_settings
from jaxdist._strategies import get_replica_context
from jaxdist._values import Variable, VariableAggregation
from jaxdist.estimator._hooks import CheckpointSaverListener, Session, call_each
from jaxdist.estimator._model.building import Built
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._running.folder import CheckpointChoice, ModelFolder

_LOG = logging.getLogger("jaxdist")
_PAUSE = 0.05


# An object, since each model has its own: a function that is made often is a mistake.
class _TrainStep:
    """The step of one replica.

    Args:
        built: The model.
        step: The global step.
        stop: Whether all workers should end; None if they are in step.
    """

    def __init__(self, built: Built, step: Variable, stop: Variable | None) -> None:
        self._built, self._step, self._stop = built, step, stop

    def __call__(self, modules: Any, optimizer: Any, features: Any, labels: Any) -> Any:
        step = self._step

        def find_loss(modules: Any) -> Any:
            spec = self._built.call_model(modules, features, labels, step.value)
            return jnp.mean(spec.loss)

        loss, grads = nnx.value_and_grad(find_loss)(modules)
        context = get_replica_context()
        optimizer.update(modules, context.all_reduce("mean", grads))
        step.assign_add(1, read_value=False)
        stop = jnp.zeros((), jnp.int32) if self._stop is None else self._stop.value()
        return context.all_reduce("mean", loss), step.value(), stop


class TrainState:
    """A model in training.

    Note [Values of servers]
    The chief makes the variables with the values of the newest checkpoint, or with initial values.
    A server that already has a variable keeps its value. So a restarted chief continues with the
    values of the servers, which are newer than its checkpoint. If the servers were restored from
    older snapshots, the chief writes the checkpoint to them again.

    Args:
        built: The model.
        restored: The checkpoint that was restored; None if there is none.
        is_shared: Whether the variables are on servers, where other workers change them too.
    """

    def __init__(self, built: Built, restored: CheckpointChoice | None, *, is_shared: bool) -> None:
        self.built, self._restored, self._is_shared = built, restored, is_shared
        self.step = first = 0 if restored is None else restored.step
        with built.strategy.scope():
            self._step_variable = Variable(
                first,
                trainable=False,
                dtype=jnp.int32,
                name="global_step",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
            if is_shared:
                self._stop = Variable(0, trainable=False, dtype=jnp.int32, name="stop")
                self._ended = Variable(0, trainable=False, dtype=jnp.int32, name="workers_ended")
        self._run = _TrainStep(built, self._step_variable, self._stop if is_shared else None)
        self.read_step()
        self.is_as_restored = self.step == first
        self._is_behind = is_shared and self.step < first
        self.is_stopped = False
        self._has_told = False

    def read_step(self) -> int:
        """Return the global step; for shared variables, that of the servers."""
        if self._is_shared:
            self.step = int(self._step_variable.numpy())
        return self.step

    def run_step(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """Take one step on all replicas; return the loss and the global step after it."""
        built = self.built
        loss, step, stop = built.strategy.run(
            self._run, (built.modules, built.optimizer, features, labels)
        )
        if not self._is_shared:
            self.step += 1
            return loss, step
        if self._is_behind and self._restored is not None:
            self._write_again(self._restored)
        else:
            self.step = int(np.asarray(step))
        self.is_stopped = bool(np.asarray(stop))
        return loss, step

    def _write_again(self, restored: CheckpointChoice) -> None:
        """Write the checkpoint to servers that have older values."""
        self._is_behind = False
        _LOG.warning(
            "The parameter servers had older values than %s, and get those of the checkpoint.",
            restored.path,
        )
        restored.restore(self.built.state)
        self._step_variable.assign(restored.step)
        self.step = restored.step

    # Signals between the workers of servers

    def stop_all(self) -> None:
        """Let the other workers end after their step."""
        if self._is_shared:
            self._stop.assign(1)

    def tell_end(self, config: RunConfig) -> None:
        """Report to the chief that this worker has ended."""
        if self._is_shared and not config.is_chief and not self._has_told:
            self._has_told = True
            self._ended.assign_add(1)

    def wait_for_workers(self, config: RunConfig) -> None:
        """Let the chief, whose data has ended, wait until the other workers have ended."""
        if not (self._is_shared and config.is_chief):
            return
        others = config.num_worker_replicas - 1
        end = time.monotonic() + get_settings().join_seconds
        seen = -1
        while (ended := int(self._ended.numpy())) < others:
            step = self.read_step()
            if step != seen:
                # Some worker still takes steps: continue to wait.
                seen, end = step, time.monotonic() + get_settings().join_seconds
            if time.monotonic() > end:
                _LOG.warning("%d of %d workers have not ended.", others - ended, others)
                return
            time.sleep(_PAUSE)
        self.read_step()


class Saver:
    """Saves checkpoints, and calls listeners around each of them.

    Args:
        folder: The folder of the model.
        listeners: The listeners.
    """

    def __init__(self, folder: ModelFolder, listeners: Sequence[CheckpointSaverListener]) -> None:
        self._folder, self._listeners = folder, list(listeners)
        self._is_chief = False
        self._step, self._time = 0, time.monotonic()

    def begin(self) -> None:
        """Call `begin` of all listeners. Only the chief calls this."""
        self._is_chief = True
        call_each(self._listeners, "begin")

    @contextlib.contextmanager
    def open(self, session: Session) -> Iterator[None]:
        """Open the folder for the steps of this training."""
        self._session = session
        with self._folder.open() as self._checkpoints:
            yield

    def is_due_by_step(self, step: int, every: int) -> bool:
        """Return whether enough steps have been taken since the last checkpoint."""
        return step >= self._step + every

    def is_due_by_time(self, seconds: float) -> bool:
        """Return whether enough time has passed since the last checkpoint."""
        return time.monotonic() >= self._time + seconds

    def save_first(self, state: TrainState) -> None:
        """Save the state before the first step, if no checkpoint has it."""
        self._step, self._time = state.step, time.monotonic()
        if state.is_as_restored and state.step not in self._checkpoints.steps():
            self.save(state)

    def save(self, state: TrainState) -> bool:
        """Save a checkpoint; return whether a listener wants the training to end."""
        checkpoints = self._checkpoints
        # Workers continue while the chief saves, so read the step before saving.
        step = state.read_step()
        self._step, self._time = step, time.monotonic()
        if step in checkpoints.steps():
            return False
        session, listeners = self._session, self._listeners if self._is_chief else []
        call_each(listeners, "before_save", session, step)
        self._folder.save(checkpoints, step, state.built.state)
        if self._is_chief:
            self._folder.delete_old()
        return any(wish is True for wish in call_each(listeners, "after_save", session, step))

    def end(self, state: TrainState) -> None:
        """Save the last step, and call `end` of all listeners."""
        self.save(state)
        if self._is_chief:
            call_each(self._listeners, "end", self._session, self._step)
