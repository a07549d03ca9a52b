"""A watched value: which of two is better, and what to say if it is not there."""

import math
from collections.abc import Mapping

from jaxdist._validate import as_number, check_text, show
from jaxdist.errors import ArgumentError

# Metrics of which more is better; as in Keras, others are better when they are smaller.
_MORE_IS_BETTER = ("acc", "auc", "precision", "recall", "f1", "top_", "fmeasure")


class Monitor:
    """Follows one value of the logs.

    Args:
        caller: The callback, for messages.
        name: The name in the logs, such as "val_loss".
        mode: "min", "max", or "auto" by the name.
        min_delta: How much better a value has to be to count.
    """

    def __init__(self, caller: str, name: str, mode: str, min_delta: float = 0.0) -> None:
        check_text(caller, "monitor", name, "val_loss")
        if mode not in ("auto", "min", "max"):
            raise ArgumentError(
                f"{caller} was given mode={show(mode)}.\n\n"
                "It says whether the best value is the smallest or the largest.\n\n"
                "Pass 'min', 'max', or 'auto', which decides by the name."
            )
        if mode == "auto":
            is_more = any(part in name for part in _MORE_IS_BETTER)
            mode = "max" if is_more else "min"
        self.name, self._caller = name, caller
        self._sign = -1.0 if mode == "max" else 1.0
        self._delta = as_number(caller, "min_delta", min_delta, least=0.0)
        self.best = math.inf * self._sign

    def read(self, logs: Mapping[str, float]) -> float:
        """Return the value, or raise if the logs do not have it."""
        if self.name not in logs:
            raise ArgumentError(
                f"{self._caller} was given monitor={self.name!r}, and the epoch has "
                f"{', '.join(logs) or 'no values'}.\n\n"
                "Values that begin with val_ are there after a validation.\n\n"
                "Pass one of these names, or validation_data to fit."
            )
        return logs[self.name]

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best one. A nan is not."""
        return value * self._sign < self.best * self._sign - self._delta

    def reset(self, best: float | None = None) -> None:
        """Forget the best value, or set it."""
        self.best = math.inf * self._sign if best is None else best
