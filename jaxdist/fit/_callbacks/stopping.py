"""Callbacks that end training or lower the learning rate when a value stops improving."""

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxdist._called import called, refuse
from jaxdist._reports import as_text, find_screen_width
from jaxdist._validate import as_flag, as_integer, as_number, check_callable, show
from jaxdist.fit._callbacks.base import Callback, Logs, Monitor
from jaxdist.training import use_average

_LOG = logging.getLogger("jaxdist")


class EarlyStopping(Callback):
    """Ends the training when a value has not improved for some epochs.

    At the end it prints the epoch, the best value, and whether its weights were restored.
    `fit.History` has the same, and `History.plot` marks it.

    Args:
        monitor: The name of the value.
        min_delta: By how much a value has to be better to count.
        patience: After how many epochs without a better value the training ends.
        verbose: 1 or 2 print, 0 does not; "auto" prints unless `fit` has `verbose=0`. In a job, one
            process prints.
        mode: "min", "max", or "auto" by the name.
        baseline: A value that the first epochs have to beat.
        restore_best_weights: Whether the model gets the weights of the best epoch at the end.
        start_from_epoch: Epochs before this one do not count.

    Example:
        >>> fit.EarlyStopping(patience=3).stopped_epoch

    Source:
        `keras.callbacks.EarlyStopping`, whose `verbose` is 0 by default.
    """

    @called("fit.EarlyStopping")
    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: str | int = "auto",
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        self._monitor = self._watched = Monitor(monitor, mode, min_delta)
        self._patience = as_integer("patience", patience, least=0)
        self._verbose = _as_verbose(verbose)
        self._baseline = None if baseline is None else as_number("baseline", baseline)
        self._restores = as_flag("restore_best_weights", restore_best_weights)
        self._start = as_integer("start_from_epoch", start_from_epoch, least=0)
        self._wait = 0
        self._weights: Any = None
        self.stopped_epoch: int | None = None
        self.best_epoch: int | None = None

    def on_train_begin(self, logs: Logs) -> None:
        self._monitor.reset()
        self._wait, self._weights = 0, None
        self.stopped_epoch = self.best_epoch = None

    def get_state(self) -> Any:
        return {
            "best": self._monitor.best,
            "best_epoch": self.best_epoch,
            "wait": self._wait,
            "stopped_epoch": self.stopped_epoch,
            "weights": self._weights,
        }

    def set_state(self, state: Any) -> None:
        self._monitor.reset(state["best"])
        self.best_epoch, self._wait = state["best_epoch"], state["wait"]
        self._weights = state["weights"] if self._restores else None
        # A training that this callback ended stays ended, unless the patience is larger now.
        if state["stopped_epoch"] is not None and self._wait >= self._patience:
            self.stopped_epoch = state["stopped_epoch"]
            self.model.stop_training = True

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        # With `fit(initial_epoch=...)`, training continues after a stop.
        self.stopped_epoch = None

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        value = self._monitor.read(logs, self.model)
        if value is None or epoch < self._start:
            return
        if self._monitor.is_better(value):
            self._monitor.best, self.best_epoch = value, epoch
            if self._restores:
                with self._watched_weights():
                    self._weights = self.model.get_weights()
            is_enough = self._baseline is None or self._is_beyond_baseline(value)
            self._wait = 0 if is_enough else self._wait + 1
            # As in Keras: an epoch that is better than all before it does not end the training,
            # even one that is not beyond the baseline.
            return
        self._wait += 1
        if self._wait >= self._patience:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs) -> None:
        if self._weights is not None:
            self.model.set_weights(self._weights)
            # The average too, so that evaluations with it have the best value.
            if self._watches_average:
                with self._watched_weights():
                    self.model.set_weights(self._weights)
        history = self.model.history
        history.monitor, history.best_epoch = self._monitor.name, self.best_epoch
        history.restored_epoch = None if self._weights is None else self.best_epoch
        text = self._describe(history.epoch[-1] if history.epoch else None)
        prints = self.params.get("verbose", 1) if self._verbose is None else self._verbose
        if text and prints and self.model.writes_logs:
            # Not by a console: rich moves printed lines above the bar that it shows.
            print(as_text([text], find_screen_width()))

    @property
    def _watches_average(self) -> bool:
        is_of_validation = self._monitor.name.startswith("val_")
        return is_of_validation and getattr(self.model, "_validates_average", False)

    def _watched_weights(self) -> contextlib.AbstractContextManager[None]:
        """Let the model have the weights that the value belongs to, in a block."""
        if not self._watches_average:
            return contextlib.nullcontext()
        return use_average(self.model.module, self.model.optimizer)

    def _describe(self, last: int | None) -> str:
        """Return a description of the stop, or an empty one if the last epoch was the best."""
        name, best = self._monitor.name, self.best_epoch
        found = None if best is None else f"{name} {self._monitor.best:.4g} of epoch {best + 1}"
        if self.stopped_epoch is not None:
            end = f"Early stop after epoch {self.stopped_epoch + 1}"
            if best is None:
                return f"{end}: {name} was never a finite number. No weights are restored."
            if self._weights is not None:
                return f"{end}: the best is {found}. The weights of epoch {best + 1} are restored."
            reason = "restore_best_weights=False"
            if self._restores:
                reason = f"the checkpoint does not have those of epoch {best + 1}"
            kept = f"The weights of epoch {self.stopped_epoch + 1} stay"
            return f"{end}: the best is {found}. {kept} ({reason})."
        if self._weights is None or best is None or best == last:
            return ""
        return f"The best is {found}. The weights of epoch {best + 1} are restored."

    def _is_beyond_baseline(self, value: float) -> bool:
        best = self._monitor.best
        self._monitor.best = self._baseline if self._baseline is not None else best
        is_beyond = self._monitor.is_better(value)
        self._monitor.best = best
        return is_beyond


def _as_verbose(verbose: Any) -> int | None:
    """Return 0, 1 or 2; None follows `fit`."""
    if isinstance(verbose, str) and verbose == "auto":
        return None
    if isinstance(verbose, (bool, int)) and verbose in (0, 1, 2):
        return int(verbose)
    raise refuse(
        f"verbose={show(verbose)}.",
        "1 and 2 print what was best and restored, 0 does not; 'auto' follows verbose of fit.",
        "Pass 'auto', 0, 1 or 2.",
    )


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
        check_callable(schedule, "schedule", "Pass a function (epoch, rate) -> rate.")
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
