"""Logs the losses and the speed of a training, and writes summaries."""

import contextlib
import json
import logging
import math
import os
import pathlib
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdist._buckets import BucketPath, Place
from jaxdist._checkpoints import replace_file
from jaxdist.errors import BucketError, NonFiniteLossError
from jaxdist.estimator._run_config import RunConfig
from jaxdist.training import EXTRAS

_LOG = logging.getLogger("jaxdist")

_NAME = "summaries.jsonl"
TENSORBOARD = next(extra for extra in EXTRAS if extra.name == "tensorboardX")


# Note [Summaries in a bucket]
# No object of a bucket can be appended to, and Google Cloud Storage writes each object at most once
# a second. So lines are collected for some seconds, and the object is replaced by one that has
# them. They are sent before each checkpoint: a run that is killed continues from the newest one,
# and writes the lines after it again. The file of events is in a temporary folder, and is copied.


class Summaries:
    """Writes `summaries.jsonl`, one line for each step, and events if tensorboardX is installed.

    jaxdist itself reads only the lines. See Note [Summaries in a bucket].

    Args:
        folder: The folder of both.
    """

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._events: Any = None
        self._lines, self._sent = "", -math.inf  # not sent yet, and when others were sent
        self._local: tempfile.TemporaryDirectory[str] | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers of a step; they are on disk afterwards, or in a bucket soon."""
        plain = {name: float(np.asarray(value)) for name, value in values.items()}
        self._lines += json.dumps({"step": step, "time": time.time(), **plain}) + "\n"
        self._write_events(step, plain)
        is_late = time.monotonic() >= self._sent + _SENT_SECONDS
        if is_late or not isinstance(self._folder, BucketPath):
            self.flush()

    def _write_events(self, step: int, values: Mapping[str, float]) -> None:
        if not TENSORBOARD.is_installed:
            return
        if self._events is None:
            from tensorboardX import SummaryWriter

            folder = str(self._folder)
            if isinstance(self._folder, BucketPath):
                self._local = tempfile.TemporaryDirectory(prefix="jaxdist-")
                folder = self._local.name
            # tensorboardX names files by the second, and would overwrite one of the same second.
            self._events = SummaryWriter(folder, filename_suffix=f".{time.time_ns()}.{os.getpid()}")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def flush(self) -> None:
        """Write what was collected.

        Raises:
            BucketError: The bucket cannot be written.
        """
        if not self._lines:
            return
        path = self._folder / _NAME
        if isinstance(path, BucketPath):
            _append(path, self._lines.encode())
            if self._local is not None:
                self._copy_events(self._local.name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                # One write, so that readers in other processes see whole lines.
                file.write(self._lines)
        self._lines, self._sent = "", time.monotonic()

    def close(self) -> None:
        """Write what was collected, close the event file, and end the thread that writes it."""
        (events, local), self._events, self._local = (self._events, self._local), None, None
        with contextlib.ExitStack() as stack:
            if local is not None:
                stack.callback(local.cleanup)
                # A thread of tensorboardX writes the last events when it is closed.
                stack.callback(self._copy_events, local.name)
            if events is not None:
                stack.callback(events.close)
            self.flush()

    def _copy_events(self, local: str) -> None:
        for events in pathlib.Path(local).iterdir():
            replace_file(self._folder / events.name, events.read_bytes())


_SENT_SECONDS = 10.0


def _append(path: BucketPath, lines: bytes) -> None:
    while True:
        found = path.read_version()
        done = path.create(lines) if found is None else path.replace(found[0] + lines, found[1])
        if done:
            return


def write_summary(folder: Place, step: int, values: Mapping[str, Any]) -> None:
    """Write the numbers of one step."""
    with contextlib.closing(Summaries(folder)) as summaries:
        summaries.write(step, values)


def read_summaries(folder: Place) -> dict[int, dict[str, float]]:
    """Return the numbers by step; the last ones, if a step was written twice."""
    found: dict[int, dict[str, float]] = {}
    try:
        lines = (folder / _NAME).read_bytes().decode().splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            values = json.loads(line)
            found[int(values.pop("step"))] = values
        except (ValueError, LookupError, TypeError, AttributeError):
            # The writing process was killed in the middle of the line.
            continue
    return found


class Losses:
    """The losses that were not checked yet.

    A loss is checked once the device has computed it, so that the loop need not wait. All are
    checked before a checkpoint is saved.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[int, Any]] = deque()

    def add(self, step: int, loss: Any) -> None:
        """Add the loss of a step, and check the losses that are computed.

        Raises:
            NonFiniteLossError: A loss is not finite.
        """
        self._open.append((step, loss))
        while self._open and _is_ready(self._open[0][1]):
            self._check(*self._open.popleft())

    def check_all(self) -> None:
        """Check all losses.

        Raises:
            NonFiniteLossError: A loss is not finite.
        """
        while self._open:
            self._check(*self._open.popleft())

    def _check(self, step: int, loss: Any) -> None:
        value = float(np.asarray(loss))
        if not np.isfinite(value):
            raise NonFiniteLossError(
                f"The loss of step {step} is {value}.\n\n"
                "Training cannot recover: the parameters are not finite either, or soon will not "
                "be. Earlier checkpoints are complete.\n\n"
                "Use a lower learning rate, clip the gradients (optax.clip), or find the operation "
                "with jax.config.update('jax_debug_nans', True)."
            )


def _is_ready(loss: Any) -> bool:
    # By its types, not every array of JAX has this method.
    return bool(getattr(loss, "is_ready", lambda: True)())


class Progress:
    """Writes summaries, and logs steps/s.

    Args:
        folder: The folder of the model.
        config: How often to write and log.
        is_chief: Whether this process writes summaries.
    """

    def __init__(self, folder: Place, config: RunConfig, *, is_chief: bool) -> None:
        self._summaries = Summaries(folder)
        self._every = config.save_summary_steps if is_chief else None
        self._log_every = config.log_step_count_steps
        self._first: tuple[int, float] | None = None
        self._next_log = self._next_summary = 0
        self._written = -1
        self._loss: Any = None

    def note(self, step: int, loss: Any) -> None:
        """Record a step."""
        self._loss = loss
        if self._first is None:
            self._first = step, time.monotonic()
            self._next_log = step + (self._log_every or 0)
            self._next_summary = step
        if self._every is not None and step >= self._next_summary:
            self._next_summary = step + self._every
            self._written = step
            self._summaries.write(step, {"loss": loss})
        if self._log_every is not None and step >= self._next_log:
            begin, began = self._first
            rate = (step - begin) / max(time.monotonic() - began, 1e-9)
            _LOG.info("step %d: loss %.6g, %.3g steps/s", step, float(np.asarray(loss)), rate)
            self._first, self._next_log = (step, time.monotonic()), step + self._log_every

    def finish(self, step: int) -> None:
        """Write the summary of the last step."""
        if self._every is not None and self._loss is not None and step != self._written:
            self._summaries.write(step, {"loss": self._loss})
        self.flush()

    def flush(self) -> None:
        """Write the summaries of all steps up to now. A checkpoint is saved after this.

        Raises:
            BucketError: The bucket cannot be written.
        """
        self._summaries.flush()

    def close(self) -> None:
        """Close the summaries, also after an error."""
        try:
            self._summaries.close()
        except BucketError as error:
            # After another error, which counts.
            _LOG.warning("The last summaries were not written: %s", error)
