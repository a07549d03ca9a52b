"""`ModelCheckpoint`: checkpoints of all epochs or of the best, and going on from them."""

from pathlib import Path
from typing import Any

from jaxdist._checkpoints import Checkpoints, make_step_error
from jaxdist._validate import as_flag, as_integer, as_path, show
from jaxdist.errors import ArgumentTypeError
from jaxdist.fit._callbacks.base import Callback, Logs
from jaxdist.fit._callbacks.monitor import Monitor


class ModelCheckpoint(Callback):
    """Saves the model after each epoch, or after the best ones only.

    Files are written in the background, and a checkpoint is complete or absent.

    Args:
        directory: Where; `training.Checkpoints` writes there.
        monitor: The name of the value that says which epoch is better.
        save_best_only: Whether only an epoch that is the best so far is saved.
        mode: "min", "max", or "auto" by the name.
        keep: How many of the newest checkpoints to keep.
        resume: Whether the training begins with the newest checkpoint, if there is one. Pass
            `initial_epoch=callback.epochs_done()` to `fit` then.

    Raises:
        CheckpointError: `fit` begins with an epoch that is not above the newest checkpoint; raised
            before this epoch.

    Example:
        >>> import tempfile
        >>> fit.ModelCheckpoint(tempfile.mkdtemp()).epochs_done()
        0

    Source:
        `keras.callbacks.ModelCheckpoint` and `BackupAndRestore`.
    """

    def __init__(
        self,
        directory: str | Path,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        keep: int = 3,
        resume: bool = False,
    ) -> None:
        caller = "fit.ModelCheckpoint"
        self._monitor = Monitor(caller, monitor, mode)
        self._only_best = as_flag(caller, "save_best_only", save_best_only)
        self._watched = self._monitor if self._only_best else None
        self._resumes = as_flag(caller, "resume", resume)
        self._directory = as_path(caller, "directory", directory, "runs/digits")
        self._keep = as_integer(caller, "keep", keep, least=1)
        self._opened: Checkpoints | None = None
        self._is_checked = False

    def epochs_done(self) -> int:
        """Return the number of epochs of the newest checkpoint; 0 without one."""
        steps = self._checkpoints.steps()
        return steps[-1] if steps else 0

    def restore(self, model: Any) -> int:
        """Read the newest checkpoint into a model.

        Args:
            model: A compiled `fit.Model`.

        Returns:
            The number of epochs of the checkpoint; 0 without one, which changes nothing.

        Raises:
            ArgumentTypeError: It is no model.
            CheckpointError: The checkpoint is of another model, which is as it was.
        """
        if not callable(getattr(model, "objects", None)):
            raise ArgumentTypeError(
                f"fit.ModelCheckpoint.restore was given model={show(model)}.\n\n"
                "It is a compiled fit.Model.\n\nPass the model whose checkpoints these are."
            )
        restored = self._checkpoints.restore(model.objects())
        if restored is None:
            return 0
        if restored.notes.get("best") is not None:
            self._monitor.reset(restored.notes["best"])
        return restored.step

    @property
    def _checkpoints(self) -> Checkpoints:
        # The first save takes the lock of the directory, and `close` gives it back.
        if self._opened is None:
            self._opened = Checkpoints(self._directory, keep=self._keep)
        return self._opened

    def on_train_begin(self, logs: Logs) -> None:
        self._monitor.reset()
        if self._resumes:
            self.restore(self.model)
        self._is_checked = False

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        # Before the first epoch: otherwise its training would be lost.
        if self._is_checked or not self.model.writes_checkpoints:
            return
        self._is_checked = True
        steps = self._checkpoints.steps()
        if steps and epoch < steps[-1]:
            resume = (
                f"To continue after epoch {steps[-1]}, pass resume=True, and to fit "
                "initial_epoch=callback.epochs_done()"
            )
            caller = "fit.ModelCheckpoint"
            folder = self._checkpoints.directory
            raise make_step_error(caller, "epoch", epoch + 1, folder, steps, resume)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_checkpoints:
            return
        if self._only_best:
            value = self._monitor.read(logs, self.model)
            if value is None or not self._monitor.is_better(value):
                return
            self._monitor.best = value
        best = self._monitor.best if self._only_best else None
        self._checkpoints.save(epoch + 1, self.model.objects(), {"logs": dict(logs), "best": best})

    def on_train_end(self, logs: Logs) -> None:
        self._checkpoints.wait_until_finished()

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
