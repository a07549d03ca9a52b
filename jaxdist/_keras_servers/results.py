"""`Results`: adds the results of steps up to the metrics of a Keras model."""

from typing import Any

import jax

from jaxdist._keras import add_to_metrics


class Results:
    """The values of the metrics of a model, to which the results of steps are added.

    Args:
        model: The Keras model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.values: list[Any] = []
        # The logs that Keras shows after a batch; None before the first result.
        self.logs: Any = None
        self._add = jax.jit(self._compute)

    def start(self, values: Any) -> None:
        """Start from the values of the variables of the metrics."""
        self.values, self.logs = list(values), None

    def add(self, result: Any, total: int) -> None:
        """Add the results of a step on `total` rows."""
        given = {name: result[name] for name in ("loss", "metrics", "rows")}
        self.logs, self.values = self._add(self.values, given, total)

    def _compute(self, values: Any, result: Any, total: Any) -> Any:
        return add_to_metrics(
            self._model, values, result["metrics"], result["loss"], result["rows"], total
        )
