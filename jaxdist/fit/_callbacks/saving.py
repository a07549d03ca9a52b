"""`ModelCheckpoint`: checkpoints of epochs or steps, and continuing from the newest."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist._buckets import Place, as_place
from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import Checkpoints, make_step_error, read_saved_notes
from jaxdist._processes import get_current_process
from jaxdist._validate import as_flag, as_integer, show
from jaxdist.errors import CheckpointError, DamagedCheckpointError
from jaxdist.fit._callbacks.base import Callback, Logs, Monitor
from jaxdist.fit._callbacks.states import make_empty_arrays

_CALLER = "fit.ModelCheckpoint"


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a training: what a resumed one needs besides the model and its optimizer.

    Attributes:
        epochs: The number of complete epochs.
        step: The number of completed steps of the next epoch.
        steps: The number of steps of all epochs.
        passes: The number of passes over the data that have begun.
        data: The position in the last pass.
        sums: The names and the sums of loss and metrics over `step` steps; None if `step` is 0.
        callbacks: The class and the state of each callback that has a state.
        logs: The values of the last complete epoch.
        arrays: The arrays that the states of the callbacks refer to.
    """

    epochs: int
    step: int = 0
    steps: int = 0
    passes: int = 0
    data: Any = None
    sums: Mapping[str, Any] | None = None
    callbacks: Sequence[tuple[str, Any]] = ()
    logs: Logs = dataclasses.field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()

    def to_notes(self) -> dict[str, Any]:
        """Return the notes of a checkpoint of this position."""
        return {name: getattr(self, name) for name in _IN_NOTES}


_IN_NOTES = tuple(f.name for f in dataclasses.fields(Position) if f.name != "arrays")


class ModelCheckpoint(Callback):
    """Saves the model after each epoch, after the best ones only, or every few steps.

    Files are written in the background, and a checkpoint is complete or absent. It holds the model,
    its optimizer, the position in the data, and the states of all callbacks.

    Args:
        directory: The directory, or `gs://` or `s3://` and a folder in a bucket;
            `training.Checkpoints` writes to it.
        monitor: The name of the value that decides which epoch is better.
        save_best_only: Whether to save only an epoch that is the best so far.
        mode: "min", "max", or "auto" by the name.
        keep: How many of the newest checkpoints to keep.
        resume: Whether `fit` continues after the newest checkpoint, if there is one: at its epoch
            and step, with the rows that come next. `epochs` of `fit` is the total, so `fit` trains
            nothing if they are done. `initial_epoch` of `fit` overrides it.
            With `save_best_only`, the newest is the best epoch, and the epochs after it are
            trained again.
        save_freq: "epoch", or the number of steps after which to save. With a number, it also
            saves after each epoch, and all checkpoints are numbered by steps.

    Raises:
        ArgumentError: `save_best_only` is combined with a number of steps.
        CheckpointError: `fit` begins with an epoch that is not after the newest checkpoint, or the
            checkpoints are numbered the other way. Raised before this epoch.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> x = np.ones((8, 2), np.float32)
        >>> for epochs in 2, 3:  # the second time, as after a restart
        ...     model = fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        ...     model.compile("sgd", "mse")
        ...     save = fit.ModelCheckpoint(folder, resume=True)
        ...     history = model.fit(x, x[:, :1], epochs=epochs, callbacks=[save], verbose=0)
        ...     history.epoch
        [0, 1]
        [2]

    Source:
        `keras.callbacks.ModelCheckpoint` and `BackupAndRestore`.
    """

    _saves_states = True

    @called(_CALLER)
    def __init__(
        self,
        directory: str | Place,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        keep: int = 3,
        resume: bool = False,
        save_freq: str | int = "epoch",
    ) -> None:
        self._monitor = Monitor(monitor, mode)
        self._only_best = as_flag("save_best_only", save_best_only)
        self._watched = self._monitor if self._only_best else None
        self._resumes = as_flag("resume", resume)
        self._directory = as_place("directory", directory, "runs/digits")
        self._keep = as_integer("keep", keep, least=1)
        self._every = _as_save_freq(save_freq)
        if self._every is not None and self._only_best:
            raise refuse(
                f"save_best_only=True and save_freq={self._every}.",
                "Which state is the best is known only after an epoch.",
                "Leave out one of them, or pass two ModelCheckpoints with two directories.",
            )
        self._opened: Checkpoints | None = None
        # `fit` sets this.
        self._find_position: Callable[[int, Logs], Position] | None = None
        self._judged: int | None = None
        self._is_best = False

    def epochs_done(self) -> int:
        """Return the number of complete epochs of the newest checkpoint; 0 if there is none.

        Raises:
            CheckpointError: Its notes cannot be read, or the checkpoints are numbered the other
                way.
        """
        newest = self._read_newest()
        return 0 if newest is None else newest.epochs

    @called(f"{_CALLER}.restore")
    def restore(self, model: Any) -> int:
        """Read the newest checkpoint into a model.

        Args:
            model: A compiled `fit.Model`.

        Returns:
            The number of complete epochs of the checkpoint; 0, and no change, if there is none.

        Raises:
            ArgumentTypeError: `model` is not a `fit.Model`.
            CheckpointError: The checkpoint is of another model. `model` then does not change.
        """
        if not callable(getattr(model, "objects", None)):
            raise refuse_type(
                f"model={show(model)}.",
                "It is a compiled fit.Model.",
                "Pass the model whose checkpoints these are.",
            )
        newest = self._read_newest()
        return 0 if newest is None else self._restore_position(model, newest).epochs

    def _read_newest(self) -> Position | None:
        """Return the position of the newest checkpoint without its arrays; None if there is none.

        Raises:
            CheckpointError: The checkpoints are numbered by steps, and `save_freq` is "epoch", or
                the other way round.
            DamagedCheckpointError: Its notes cannot be read.
        """
        steps = self._checkpoints.steps()
        if not steps:
            return None
        notes = read_saved_notes(self._checkpoints.directory, steps[-1])
        if notes is None:
            raise DamagedCheckpointError(
                f"The notes of checkpoint {steps[-1]} in {self._checkpoints.directory} cannot be "
                "read.\n\n"
                "They say how many epochs are complete, and how to continue.\n\n"
                f"Move {self._checkpoints.path(steps[-1])} away to continue from the one before."
            )
        kind = notes.get("numbered_by", "epochs")
        if kind != self._kind:
            raise self._make_kind_error(kind)
        known: dict[str, Any] = {"epochs": steps[-1], "passes": steps[-1]}
        known.update((name, notes[name]) for name in _IN_NOTES if name in notes)
        return Position(**known)

    def _restore_position(self, model: Any, newest: Position) -> Position:
        """Read the newest checkpoint into a model, and return its position with its arrays.

        Args:
            model: A compiled `fit.Model`.
            newest: The position from `_read_newest`.

        Raises:
            CheckpointError: The checkpoint is of another model, or another program replaced it.
        """
        arrays = make_empty_arrays(newest.callbacks)
        objects = model.objects()
        restored = self._checkpoints.restore(
            {**objects, "callbacks": arrays} if arrays else objects
        )
        number = self._get_number(newest)
        if restored is None or restored.step != number:
            raise CheckpointError(
                f"{_CALLER} found checkpoint {number} in {self._checkpoints.directory} and, a "
                f"moment later, {'none' if restored is None else restored.step} as the newest.\n\n"
                "Only one program at a time writes into a directory or deletes from it.\n\n"
                "End the other program, and begin again with a new model."
            )
        if restored.notes.get("best") is not None:
            self._monitor.reset(restored.notes["best"])
        return dataclasses.replace(newest, arrays=restored.state["callbacks"] if arrays else ())

    @property
    def _kind(self) -> str:
        """The unit in which the checkpoints are numbered."""
        return "epochs" if self._every is None else "steps"

    def _get_number(self, position: Position) -> int:
        """Return the number of the checkpoint for a position."""
        return position.epochs if self._every is None else position.steps

    @property
    def _checkpoints(self) -> Checkpoints:
        # The first save locks the directory, and `close` unlocks it.
        if self._opened is None:
            self._opened = Checkpoints(self._directory, keep=self._keep)
        return self._opened

    @called(_CALLER)
    def _check_begin(self, epoch: int, steps: int, *, resumed: bool) -> None:
        """Check that a training begins after all existing checkpoints.

        Args:
            epoch: The epoch that the training begins with, from 0.
            steps: The number of steps before it.
            resumed: Whether it continues from a checkpoint.

        Raises:
            CheckpointError: It does not. Raised before the first epoch, which would be lost.
        """
        saved = self._checkpoints.steps()
        noun, first = ("epoch", epoch) if self._every is None else ("step", steps)
        if not saved or first >= saved[-1]:
            return
        remedy = "leave out initial_epoch" if resumed else "pass resume=True"
        resume = f"To continue after {noun} {saved[-1]}, {remedy}"
        folder = self._checkpoints.directory
        raise make_step_error(noun, first + 1, folder, saved, resume)

    @property
    def _saves_steps(self) -> bool:
        """Whether it saves every few steps."""
        return self._every is not None

    def _is_due(self, before: int, after: int) -> bool:
        """Whether to save after the steps from `before` to `after`, which one dispatch ran."""
        return self._every is not None and before // self._every < after // self._every

    def on_train_begin(self, logs: Logs) -> None:
        self._monitor.reset()
        self._judged = None

    def get_state(self) -> Any:
        return {"best": self._monitor.best}

    def set_state(self, state: Any) -> None:
        self._monitor.reset(state["best"])

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_checkpoints:
            return
        if not self._judge(epoch, logs):
            return
        if self._find_position is None:
            # Without `fit`, only the epoch is known.
            self._save(Position(epoch + 1, logs=dict(logs)))
        else:
            self._save(self._find_position(epoch, logs))

    def _judge(self, epoch: int, logs: Logs) -> bool:
        """Whether to save after an epoch. Later calls for the same epoch return the same.

        Other savers call it too, before they save. So their checkpoints have the best value of each
        callback, including those that save later.
        """
        if not self._only_best:
            return True
        if self._judged != epoch:
            value = self._monitor.read(logs, self.model)
            self._is_best = value is not None and self._monitor.is_better(value)
            if value is not None and self._is_best:
                self._monitor.best = value
            self._judged = epoch
        return self._is_best

    def _save(self, position: Position) -> None:
        """Save the model at a position, which numbers the checkpoint."""
        best = self._monitor.best if self._only_best else None
        notes = {**position.to_notes(), "numbered_by": self._kind, "best": best}
        objects = self.model.objects()
        # Arrays of the first process, like its notes: other processes may have other callbacks.
        if position.arrays and get_current_process().is_first:
            objects["callbacks"] = list(position.arrays)
        self._checkpoints.save(self._get_number(position), objects, notes)

    def on_train_end(self, logs: Logs) -> None:
        self._checkpoints.wait_until_finished()

    def close(self) -> None:
        self._find_position = None
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    @called(_CALLER)
    def _make_kind_error(self, kind: str) -> CheckpointError:
        given = "'epoch'" if self._every is None else str(self._every)
        other = "100 (any number of steps)" if kind == "steps" else "'epoch'"
        return refuse(
            f"save_freq={given} and {self._checkpoints.directory}, whose checkpoints are numbered "
            f"by {kind}.",
            "All checkpoints of a directory are numbered by epochs, or all by steps.",
            f"Pass save_freq={other}, or choose another directory.",
            kind=CheckpointError,
        )


def _as_save_freq(given: Any) -> int | None:
    """Return the number of steps between saves; None to save after each epoch."""
    if isinstance(given, str) and given == "epoch":
        return None
    remedy = "Pass 'epoch', or for instance 100."
    return as_integer("save_freq", given, least=1, remedy=remedy)
