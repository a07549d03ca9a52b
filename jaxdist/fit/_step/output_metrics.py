"""Metrics of single outputs, for a model with several."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import jax

from jaxdist._called import refuse_type
from jaxdist._validate import as_list, show
from jaxdist.fit._step.find_metrics import find_metrics
from jaxdist.fit._step.metrics import Metric, Sums
from jaxdist.fit._step.output_losses import Key, name_output, pick


class OutputMetric(Metric):
    """A metric of one output.

    Args:
        metric: The metric.
        key: The key of the output in the model's outputs and in `y`.
    """

    def __init__(self, metric: Metric, key: Key) -> None:
        super().__init__(f"{name_output(key)}_{metric.name}")
        self._metric, self._key = metric, key
        self._takes_all_weights = metric._takes_all_weights

    @final
    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        what = f"the metric {self.name!r}"
        y_true, y_pred = (
            pick(what, where, tree, self._key) for where, tree in (("y", y_true), ("", y_pred))
        )
        return self._metric.sums(y_true, y_pred, weight)

    @final
    def result(self, sums: Sums) -> float:
        return self._metric.result(sums)


def find_output_metrics(name: str, metrics: Any, loss: Any) -> list[Metric]:
    """Return the metrics of `compile`, for a single output or by output.

    Raises:
        ArgumentError: A metric has an unknown name, or two have the same name.
        ArgumentTypeError: The losses are a dict or a list, and the metrics are something else.
    """
    given: Mapping[Key, Any]
    if isinstance(metrics, Mapping):
        given = metrics
    elif isinstance(loss, (list, tuple)) and metrics and isinstance(metrics, (list, tuple)):
        _check_length(name, metrics, loss)
        given = dict(enumerate(metrics))
    elif isinstance(loss, Mapping) and metrics:
        raise refuse_type(
            f"losses of the outputs {list(loss)}, and {name}={show(metrics)}.",
            f"With a dict of losses, {name} is a dict from outputs to metrics.",
            f"Pass for instance {name}={{{next(iter(loss), 'a')!r}: ['mae']}}.",
        )
    else:
        what, remedy = "a list of metrics", f"Pass {name}=['accuracy']."
        return find_metrics(name, as_list(name, metrics, what, remedy))
    found: list[Metric] = []
    for key, entries in given.items():
        of_output = entries if isinstance(entries, (list, tuple)) else [entries]
        listed = [entry for entry in of_output if entry is not None]
        of_key = find_metrics(f"{name}[{key!r}]", listed)
        found += [OutputMetric(metric, key) for metric in of_key]
    return found


def _check_length(name: str, metrics: Sequence[Any], loss: Sequence[Any]) -> None:
    if len(metrics) != len(loss):
        raise refuse_type(
            f"{len(loss)} losses, and {len(metrics)} entries of {name}.",
            f"With a list of losses, {name} has the metrics of each output; None or [] means "
            "no metrics.",
            f"Pass for instance {name}={[['mae'], *[[]] * (len(loss) - 1)]}.",
        )
