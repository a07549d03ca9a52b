"""Callbacks that change the learning rate."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, as_number, check_callable, show
from jaxdist.fit._callbacks.base import Callback, Logs
from jaxdist.fit._callbacks.monitor import Monitor

_LOG = logging.getLogger("jaxdist")


class LearningRateScheduler(Callback):
    """Sets the learning rate before each epoch.

    Args:
        schedule: `(epoch) -> rate` or `(epoch, rate) -> rate`.

    Example:
        >>> halves = fit.LearningRateScheduler(lambda epoch, rate: rate / 2)

    Source:
        `keras.callbacks.LearningRateScheduler`.
    """

    @called("fit.LearningRateScheduler")
    def __init__(self, schedule: Callable[..., float]) -> None:
        check_callable(schedule, "schedule", "Pass (epoch, rate).")
        self._schedule = schedule
        self._takes_rate = len(inspect.signature(schedule).parameters) > 1

    @called("fit.LearningRateScheduler")
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        model = self.model
        args = (epoch, model.learning_rate) if self._takes_rate else (epoch,)
        rate: Any = self._schedule(*args)
        # A schedule of optax returns an array.
        if isinstance(rate, jax.Array) and rate.ndim == 0:
            rate = rate.item()
        name = f"a schedule that returned, for epoch {epoch},"
        model.learning_rate = as_number(name, rate, least=0.0, example=0.01)


class ReduceLROnPlateau(Callback):
    """Lowers the learning rate when a value has not improved for some epochs.

    Args:
        monitor: The name of the value.
        factor: The factor of each change, below 1.
        patience: After how many epochs without a better value the rate is lowered.
        mode: "min", "max", or "auto" by the name.
        min_delta: By how much a value has to be better to count.
        cooldown: How many epochs after a change do not count.
        min_lr: The lowest rate.

    Example:
        >>> calmer = fit.ReduceLROnPlateau(factor=0.2, patience=5)

    Source:
        `keras.callbacks.ReduceLROnPlateau`.
    """

    @called("fit.ReduceLROnPlateau")
    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        self._monitor = self._watched = Monitor(monitor, mode, min_delta)
        self._factor = as_number("factor", factor, least=0.0, example=0.1)
        if self._factor >= 1:
            raise refuse(
                f"factor={show(factor)}.",
                "The rate is multiplied by it and becomes lower, so it is below 1.",
                "Pass for instance factor=0.1.",
            )
        self._patience = as_integer("patience", patience, least=0)
        self._cooldown = as_integer("cooldown", cooldown, least=0)
        self._least = as_number("min_lr", min_lr, least=0.0)
        self._wait = self._cooling = 0

    def on_train_begin(self, logs: Logs) -> None:
        self._monitor.reset()
        self._wait = self._cooling = 0

    def get_state(self) -> Any:
        return {"best": self._monitor.best, "wait": self._wait, "cooling": self._cooling}

    def set_state(self, state: Any) -> None:
        self._monitor.reset(state["best"])
        self._wait, self._cooling = state["wait"], state["cooling"]

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self._monitor.read(logs, self.model)
        if value is None:
            return
        if self._cooling > 0:
            self._cooling -= 1
            self._wait = 0
        if self._monitor.is_better(value):
            self._monitor.best, self._wait = value, 0
            return
        if self._cooling > 0:
            return
        self._wait += 1
        rate = self.model.learning_rate
        if self._wait >= self._patience and rate > self._least:
            self.model.learning_rate = max(rate * self._factor, self._least)
            _LOG.info("the learning rate is %g after epoch %d", self.model.learning_rate, epoch + 1)
            self._wait, self._cooling = 0, self._cooldown
