"""Logs the losses and the speed of a training."""

import logging
import pathlib
import time
from collections import deque
from typing import Any

import numpy as np

from jaxdist.errors import NonFiniteLossError
from jaxdist.estimator._run_config import RunConfig
from jaxdist.estimator._running.summaries import Summaries

_LOG = logging.getLogger("jaxdist")


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
                "be. The checkpoints before are complete.\n\n"
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

    def __init__(self, folder: pathlib.Path, config: RunConfig, *, is_chief: bool) -> None:
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

    def close(self) -> None:
        """Close the summaries, also after an error."""
        self._summaries.close()
