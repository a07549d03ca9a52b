"""`Tracker`, the callback that writes the logs of `fit` into one, and TensorBoard.

One process of a job makes the tracker and writes.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxdist._called import called, refuse_type
from jaxdist._validate import as_integer, as_path, check_callable, show
from jaxdist.fit._callbacks.base import Callback, Logs
from jaxdist.training import require_extra

_CALLER = "fit.TrackerLogger"


@runtime_checkable
class Tracker(Protocol):
    """Writes numbers for a tool such as Weights & Biases, MLflow or TensorBoard.

    Any class with these two methods is one. It need not inherit from this.

    Example:
        >>> class Printer:
        ...     def log(self, metrics, step):
        ...         print(step, sorted(metrics))
        ...     def close(self, completed):
        ...         print("completed:", completed)
        >>> isinstance(Printer(), fit.Tracker)
        True

    Source:
        The common part of the trackers of Accelerate, the loggers of Lightning and the metric
        writers of CLU.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers by their names. Steps never become lower within one training."""

    def close(self, completed: bool) -> None:
        """End the run; `completed` is False after an exception or Ctrl-C."""


class TrackerLogger(Callback):
    """Writes the logs of `fit` into a tracker.

    Only the process of a job that writes logs makes a tracker: before its first epoch, and not at
    all if no epoch is left to train. When `fit` ends, in whatever way, the tracker is closed.
    A training that `ModelCheckpoint(resume=True)` continues also continues the steps. What was
    logged after the checkpoint is logged again, with the same steps.

    Args:
        make: Returns the tracker. To continue a run after a restart, return one of the same run.
        log_freq: "epoch": the step is the number of the epoch, from 0. With a number N, it also
            logs after every N training steps, the values of the epoch so far, and the step is the
            number of training steps so far, also for epochs. With `initial_epoch`, the steps of
            epochs that this callback has not seen are computed from the length of the dataset; if
            that is unknown, they are not counted.

    Raises:
        ArgumentTypeError: `make` is not a function, or it returns something that has no `log` or no
            `close`.

    Cost:
        With a number, `fit` waits for the devices after each dispatch.

    Example:
        >>> class Printer:
        ...     def log(self, metrics, step):
        ...         print(step, sorted(metrics))
        ...     def close(self, completed):
        ...         print("completed:", completed)
        >>> model = fit.Model(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 2), np.float32)
        >>> log = fit.TrackerLogger(Printer)
        >>> history = model.fit(x, x[:, :1], epochs=2, callbacks=[log], verbose=0)
        0 ['loss']
        1 ['loss']
        completed: True
    """

    @called(_CALLER)
    def __init__(self, make: Callable[[], Tracker], log_freq: str | int = "epoch") -> None:
        check_callable(make, "make", "Pass a function that makes the tracker, or its class.")
        self._make = make
        self._tracker: Tracker | None = None
        self._every: int | None = None
        if not (isinstance(log_freq, str) and log_freq == "epoch"):
            remedy = "Pass 'epoch', or for instance 100."
            self._every = as_integer("log_freq", log_freq, least=1, remedy=remedy)
            # Those of a subclass, which these would hide.
            self._own_begin, self._own_end = self.on_train_batch_begin, self.on_train_batch_end
            # Only here: `fit` waits for the devices where a callback has the second of them.
            vars(self).update(
                on_train_batch_begin=self._begin_batch, on_train_batch_end=self._end_batch
            )
        # Training steps before this epoch, None until they are known; and those until now.
        self._before: int | None = None
        self._steps = 0
        # Those before each epoch that this callback knows, also from earlier trainings.
        self._starts = {0: 0}
        self._logged: tuple[int, set[str]] = (-1, set())
        self._is_completed = False

    def on_train_begin(self, logs: Logs) -> None:
        self._before, self._logged = None, (-1, set())

    def get_state(self) -> Any:
        return None if self._every is None else {"before": self._before}

    def set_state(self, state: Any) -> None:
        # None if the training before counted epochs.
        if state is not None:
            self._before = state["before"]

    @called(_CALLER)
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        if self._before is None:
            # Later epochs are those of a training that begins anew.
            self._starts = {n: steps for n, steps in self._starts.items() if n <= epoch}
            last = max(self._starts)
            unseen = (epoch - last) * (self.params.get("steps") or 0)
            self._before = self._starts[last] + unseen
        if self._tracker is None and self.model.writes_logs:
            tracker = self._make()
            if not isinstance(tracker, Tracker):
                raise refuse_type(
                    f"a function make that returned {show(tracker)}.",
                    "A tracker has the methods log(metrics, step) and close(completed).",
                    "Return an object that has both, as fit.Tracker documents them.",
                )
            self._tracker = tracker

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._log(logs, epoch if self._every is None else self._steps)
        if self._every is not None:
            self._before = self._starts[epoch + 1] = self._steps

    def _complete(self) -> None:
        self._is_completed = True

    def close(self) -> None:
        tracker, self._tracker = self._tracker, None
        is_completed, self._is_completed = self._is_completed, False
        if tracker is not None:
            tracker.close(is_completed)

    def _begin_batch(self, batch: int, logs: Logs) -> None:
        self._steps = (self._before or 0) + batch
        self._own_begin(batch, logs)

    def _end_batch(self, batch: int, logs: Logs) -> None:
        last, self._steps = self._steps, (self._before or 0) + batch + 1
        every = self._every or 1
        if self._steps // every > last // every:
            self._log(logs, self._steps)
        self._own_end(batch, logs)

    def _log(self, logs: Logs, step: int) -> None:
        """Log values, without those that the last step of an epoch has logged already."""
        if self._tracker is None:
            return
        names = self._logged[1] if self._logged[0] == step else set()
        fresh = {name: value for name, value in logs.items() if name not in names}
        self._logged = (step, {*names, *fresh})
        if fresh:
            self._tracker.log(fresh, step)


class TensorBoard(TrackerLogger):
    """Writes the values of each epoch for TensorBoard, with the package tensorboardX.

    Values of training are in the folder `train`, and those of validation in `validation`, under
    the same names, as Keras writes them.

    Args:
        log_dir: The folder for `tensorboard --logdir`.

    Raises:
        MissingExtraError: tensorboardX is not installed.

    Source:
        `keras.callbacks.TensorBoard`.
    """

    @called("fit.TensorBoard")
    def __init__(self, log_dir: str | Path = "logs") -> None:
        folder = Path(as_path("log_dir", log_dir, "logs"))
        require_extra("tensorboardX", "write logs for TensorBoard")
        super().__init__(lambda: _Events(folder))


class _Events:
    """The tracker of `TensorBoard`: event files in two folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer = self._open("validation" if name.startswith("val_") else "train")
            writer.add_scalar(f"epoch_{name.removeprefix('val_')}", value, step)
        for writer in self._writers.values():
            writer.flush()

    def close(self, completed: bool) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _open(self, part: str) -> Any:
        if part not in self._writers:
            from tensorboardX import SummaryWriter

            # tensorboardX names files by the second, and would overwrite one of the same second.
            self._writers[part] = SummaryWriter(
                str(self._folder / part), filename_suffix=f".{time.time_ns()}.{os.getpid()}"
            )
        return self._writers[part]
