"""Callbacks that write logs: CSV, JSON lines, TensorBoard, and a profile of steps.

In a job of several processes one of them writes logs; each records its own profile.
"""

import csv
import json
import os
import time
from pathlib import Path
from typing import Any

import jax

from jaxdist._devices import chips
from jaxdist._validate import as_flag, as_integer, as_path
from jaxdist.errors import ArgumentError, BackendStartedError
from jaxdist.fit._callbacks.base import Callback, Logs
from jaxdist.training import require_extra


class CSVLogger(Callback):
    """Writes the values of each epoch as a line of a CSV file.

    Each line is on disk after its epoch. The columns are the names of the first epoch of the file.

    Args:
        filename: The file.
        separator: Between two values.
        append: Whether an existing file is continued.

    Example:
        >>> import tempfile
        >>> log = fit.CSVLogger(tempfile.mkdtemp() + "/log.csv")

    Source:
        `keras.callbacks.CSVLogger`.
    """

    def __init__(self, filename: str | Path, separator: str = ",", append: bool = False) -> None:
        caller = "fit.CSVLogger"
        self._path = Path(as_path(caller, "filename", filename, "log.csv"))
        if not isinstance(separator, str) or len(separator) != 1:
            raise ArgumentError(
                f"{caller} was given separator={separator!r}.\n\nIt is one character.\n\n"
                "Pass for instance separator=','."
            )
        self._separator = separator
        self._appends = as_flag(caller, "append", append)
        self._names: list[str] = []

    def on_train_begin(self, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        self._names = []
        if self._appends and self._path.exists():
            with self._path.open(newline="") as file:
                self._names = next(csv.reader(file, delimiter=self._separator), [])
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        row: dict[str, Any] = {"epoch": epoch, **logs}
        is_new = not self._names
        self._names = self._names or list(row)
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(
                file, self._names, delimiter=self._separator, extrasaction="ignore", restval="NA"
            )
            if is_new:
                writer.writeheader()
            writer.writerow(row)


class JSONLogger(Callback):
    """Writes the values of each epoch as a line of JSON.

    Args:
        filename: The file.
        append: Whether an existing file is continued.

    Example:
        >>> import tempfile
        >>> log = fit.JSONLogger(tempfile.mkdtemp() + "/log.jsonl")
    """

    def __init__(self, filename: str | Path, append: bool = False) -> None:
        caller = "fit.JSONLogger"
        self._path = Path(as_path(caller, "filename", filename, "log.jsonl"))
        self._appends = as_flag(caller, "append", append)

    def on_train_begin(self, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._appends or not self._path.exists():
            self._path.write_text("")

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        with self._path.open("a") as file:
            file.write(json.dumps({"epoch": epoch, **logs}) + "\n")


class TensorBoard(Callback):
    """Writes the values of each epoch for TensorBoard, with the package tensorboardX.

    Values of training are in the folder `train`, those of the validation in `validation`, under
    the same names, as Keras writes them.

    Args:
        log_dir: The folder for `tensorboard --logdir`.

    Raises:
        MissingExtraError: tensorboardX is not installed.

    Source:
        `keras.callbacks.TensorBoard`.
    """

    def __init__(self, log_dir: str | Path = "logs") -> None:
        self._folder = Path(as_path("fit.TensorBoard", "log_dir", log_dir, "logs"))
        require_extra("tensorboardX", "write logs for TensorBoard")
        self._writers: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        for name, value in logs.items():
            is_held_out = name.startswith("val_")
            writer = self._open("validation" if is_held_out else "train")
            writer.add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _open(self, part: str) -> Any:
        if part not in self._writers:
            from tensorboardX import SummaryWriter

            # tensorboardX names a file by the second, and would overwrite one of the same second.
            self._writers[part] = SummaryWriter(
                str(self._folder / part), filename_suffix=f".{time.time_ns()}.{os.getpid()}"
            )
        return self._writers[part]


class Profiler(Callback):
    """Records a profile of some dispatches with `jax.profiler`.

    Args:
        log_dir: The folder, for TensorBoard or Perfetto.
        first: The first batch of the first epoch that is recorded; 0 would record compiling.
        count: How many dispatches.

    Example:
        >>> import tempfile
        >>> profile = fit.Profiler(tempfile.mkdtemp(), first=10, count=5)

    Source:
        `profile_batch` of `keras.callbacks.TensorBoard`.
    """

    def __init__(self, log_dir: str | Path, first: int = 2, count: int = 10) -> None:
        caller = "fit.Profiler"
        self._folder = as_path(caller, "log_dir", log_dir, "logs")
        self._first = as_integer(caller, "first", first, least=0)
        self._count = as_integer(caller, "count", count, least=1)
        self._left = 0
        self._is_recording = self._is_done = False

    def on_train_begin(self, logs: Logs) -> None:
        if chips.has_loaded_libtpu() and not chips.chips_of_this_machine():
            raise BackendStartedError(
                "fit.Profiler was used in a process that has loaded libtpu, on a machine without a "
                "TPU.\n\n"
                "The profiler of libtpu needs a TPU, and would end the process. JAX loads libtpu "
                "with the first array, unless JAX_PLATFORMS leaves it out.\n\n"
                "Start Python with JAX_PLATFORMS=cpu."
            )
        self._stop()
        self._is_done, self._left = False, self._count

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if not self._is_done and not self._is_recording and batch >= self._first:
            jax.profiler.start_trace(self._folder)
            self._is_recording = True

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        if self._is_recording:
            self._left -= 1
            if self._left == 0:
                self._stop()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._stop()

    def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._is_recording:
            jax.profiler.stop_trace()
            self._is_recording, self._is_done = False, True
