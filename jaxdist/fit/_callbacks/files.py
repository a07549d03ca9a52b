"""Callbacks that write files: logs as CSV or JSON lines, and a profile of steps.

In a job of several processes, one process writes logs; each process records its own profile.
"""

import abc
import csv
import json
import logging
import os
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._devices import chips
from jaxdist._validate import as_flag, as_integer, as_path, is_array
from jaxdist.errors import BackendStartedError
from jaxdist.fit._callbacks.base import Callback, Logs

_LOG = logging.getLogger("jaxdist")


class _EpochLog(Callback, abc.ABC):
    """A file with a line per epoch; a resumed training continues after its last saved epoch."""

    def __init__(self, filename: str | Path, example: str, append: bool) -> None:
        self._path = Path(as_path("filename", filename, example))
        self._appends = as_flag("append", append)
        self._is_begun = False

    def on_train_begin(self, logs: Logs) -> None:
        self._is_begun = False

    def get_state(self) -> Any:
        is_kept = self._is_begun or self._appends
        return {"bytes": self._path.stat().st_size if is_kept and self._path.exists() else 0}

    def set_state(self, state: Any) -> None:
        if not self.model.writes_logs:
            return
        self._begin(appends=True)
        # The resumed training writes these lines again.
        if self._path.stat().st_size > state["bytes"]:
            os.truncate(self._path, state["bytes"])

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if not self.model.writes_logs:
            return
        if not self._is_begun:
            self._begin(appends=self._appends)
        with self._path.open("a", newline="") as file:
            self._write(file, {"epoch": epoch, **logs})

    def _begin(self, *, appends: bool) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.open("a" if appends else "w").close()
        self._is_begun = True

    @abc.abstractmethod
    def _write(self, file: TextIO, row: dict[str, Any]) -> None: ...


class CSVLogger(_EpochLog):
    """Writes the values of each epoch as a line of a CSV file.

    Each line is on disk after its epoch. The columns are the names of the first epoch of the file,
    and those of validation if a later epoch has one. A value without a column is logged once. A
    training that `ModelCheckpoint(resume=True)` continues also continues the file.

    Args:
        filename: The file.
        separator: The string between two values.
        append: Whether to continue an existing file.

    Example:
        >>> import tempfile
        >>> log = fit.CSVLogger(tempfile.mkdtemp() + "/log.csv")

    Source:
        `keras.callbacks.CSVLogger`.
    """

    @called("fit.CSVLogger")
    def __init__(self, filename: str | Path, separator: str = ",", append: bool = False) -> None:
        super().__init__(filename, "log.csv", append)
        if not isinstance(separator, str) or len(separator) != 1:
            raise refuse(
                f"separator={separator!r}.",
                "It is one character.",
                "Pass for instance separator=','.",
            )
        self._separator = separator
        self._left_out: set[str] = set()

    def _write(self, file: TextIO, row: dict[str, Any]) -> None:
        with self._path.open(newline="") as lines:
            names: list[str] = next(csv.reader(lines, delimiter=self._separator), [])
        is_new = not names
        if is_new:
            names = list(row)
            # As in Keras: the first validation may come some epochs later.
            if getattr(self.model, "_validates_every", None) and not any(
                n.startswith("val_") for n in names
            ):
                names += [f"val_{name}" for name in names if name != "epoch"]
        left_out = [n for n in row if n not in names and n not in self._left_out]
        if left_out:
            self._left_out.update(left_out)
            _LOG.warning(
                "fit.CSVLogger: %s has no column for %s, so these values are not written. Pass "
                "another file, or append=False.",
                self._path,
                ", ".join(left_out),
            )
        writer = csv.DictWriter(
            file, names, delimiter=self._separator, extrasaction="ignore", restval="NA"
        )
        if is_new:
            writer.writeheader()
        writer.writerow(row)


class JSONLogger(_EpochLog):
    """Writes the values of each epoch as a line of JSON.

    A training that `ModelCheckpoint(resume=True)` continues also continues the file.

    Args:
        filename: The file.
        append: Whether to continue an existing file.

    Example:
        >>> import tempfile
        >>> log = fit.JSONLogger(tempfile.mkdtemp() + "/log.jsonl")
    """

    @called("fit.JSONLogger")
    def __init__(self, filename: str | Path, append: bool = False) -> None:
        super().__init__(filename, "log.jsonl", append)

    def _write(self, file: TextIO, row: dict[str, Any]) -> None:
        # A callback of the user may add numbers of NumPy and JAX.
        numbers = {n: np.asarray(v).tolist() if is_array(v) else v for n, v in row.items()}
        file.write(json.dumps(numbers) + "\n")


class Profiler(Callback):
    """Records a profile of some dispatches with `jax.profiler`.

    Args:
        log_dir: The folder, for TensorBoard or Perfetto.
        first: The first batch of the first epoch to record; 0 would record compiling.
        count: How many dispatches to record.

    Example:
        >>> import tempfile
        >>> profile = fit.Profiler(tempfile.mkdtemp(), first=10, count=5)

    Source:
        `profile_batch` of `keras.callbacks.TensorBoard`.
    """

    @called("fit.Profiler")
    def __init__(self, log_dir: str | Path, first: int = 2, count: int = 10) -> None:
        self._folder = as_path("log_dir", log_dir, "logs")
        self._first = as_integer("first", first, least=0)
        self._count = as_integer("count", count, least=1)
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
