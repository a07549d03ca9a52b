"""Watches a value of the logs: decides which of two is better, and reports a missing one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._called import called, name_call, refuse
from jaxdist._validate import as_number, check_text, show
from jaxdist.fit._callbacks.base import Callback, LambdaCallback

# Metrics for which higher is better. As in Keras, lower is better for all others.
_MORE_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "top_", "fmeasure")


class Monitor:
    """Follows one value of the logs.

    Args:
        caller: The callback, for messages.
        name: The name in the logs, such as "val_loss".
        mode: "min", "max", or "auto" by the name.
        min_delta: By how much a value has to be better to count.
    """

    def __init__(self, name: str, mode: str, min_delta: float = 0.0) -> None:
        check_text("monitor", name, "val_loss")
        if not isinstance(mode, str) or mode not in ("auto", "min", "max"):
            raise refuse(
                f"mode={show(mode)}.",
                "It says whether the best value is the smallest or the largest.",
                "Pass 'min', 'max', or 'auto', which decides by the name.",
            )
        if mode == "auto":
            is_more = any(part in name for part in _MORE_IS_BETTER)
            mode = "max" if is_more else "min"
        self.name, self._caller = name, name_call()
        self._sign = -1.0 if mode == "max" else 1.0
        self._delta = as_number("min_delta", min_delta, least=0.0)
        self.best = math.inf * self._sign

    @called(lambda self: self._caller)
    def read(self, logs: Mapping[str, float], model: Any) -> float | None:
        """Return the value, or None after an epoch without validation.

        Raises:
            ArgumentError: No epoch has this value in its logs.
        """
        if self.name not in logs:
            validates_every = getattr(model, "_validates_every", None)
            if self.name.startswith("val_") and (validates_every or 1) > 1:
                return None
            raise refuse(
                f"monitor={self.name!r}, and the epoch has {', '.join(logs) or 'no values'}.",
                "Values that begin with val_ are there after a validation.",
                "Pass one of these names, or validation_data to fit.",
            )
        return logs[self.name]

    @called(lambda self: self._caller)
    def check(self) -> None:
        """Check the name, for a `fit` without validation.

        Raises:
            ArgumentError: It is the name of a validation value.
        """
        if self.name.startswith("val_"):
            raise refuse(
                f"monitor={self.name!r}, and fit has neither validation_data nor validation_split.",
                "Values that begin with val_ are there after a validation.",
                "Pass validation_data=(x, y) or validation_split=0.1 to fit, or monitor="
                f"{self.name.removeprefix('val_')!r}.",
            )

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best one. A nan is not."""
        return value * self._sign < self.best * self._sign - self._delta

    def reset(self, best: float | None = None) -> None:
        """Forget the best value, or set it."""
        self.best = math.inf * self._sign if best is None else best


def check_watched(callbacks: Sequence[Callback], *, validates: bool) -> None:
    """Check, before training, that the values that callbacks watch will exist.

    A callback of the user may add values to the logs of an epoch. If there is one, nothing is
    checked here.

    Args:
        callbacks: All callbacks of a `fit`.
        validates: Whether the `fit` has validation data.

    Raises:
        ArgumentError: A callback watches a validation value, and `fit` does not validate.
    """
    if validates or any(map(_may_add_values, callbacks)):
        return
    for callback in callbacks:
        if callback._watched is not None:
            callback._watched.check()


def _may_add_values(callback: Callback) -> bool:
    own = type(callback).on_epoch_end.__module__.partition(".")[0]
    return own != "jaxdist" or isinstance(callback, LambdaCallback)
