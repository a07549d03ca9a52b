"""`Saver`: decides when to save a checkpoint, and calls the listeners."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from jaxdist.estimator._hooks import CheckpointSaverListener, NameFailure, Session
from jaxdist.estimator._running.folder import ModelFolder
from jaxdist.estimator._running.state import TrainState


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
        for listener in self._listeners:
            with NameFailure(listener, "begin"):
                listener.begin()

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
        for listener in listeners:
            with NameFailure(listener, "before_save"):
                listener.before_save(session, step)
        self._folder.save(checkpoints, step, state.built.state)
        if self._is_chief:
            self._folder.delete_old()
        wishes = []
        for listener in listeners:
            with NameFailure(listener, "after_save"):
                wishes.append(listener.after_save(session, step) is True)
        return any(wishes)

    def end(self, state: TrainState) -> None:
        """Save the last step, and call `end` of all listeners."""
        self.save(state)
        for listener in self._listeners if self._is_chief else []:
            with NameFailure(listener, "end"):
                listener.end(self._session, self._step)
