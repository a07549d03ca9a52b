"""Finds metrics by name and by output, and checks their sums."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxdist._called import refuse, refuse_type
from jaxdist._validate import as_list, check_callable, is_array, show
from jaxdist.errors import ArgumentTypeError, ShapeError
from jaxdist.fit._step.class_metrics import Accuracy
from jaxdist.fit._step.losses import find_loss, shapes_of_twice
from jaxdist.fit._step.metrics import Mean, Metric, RootMeanSquaredError, Sums
from jaxdist.fit._step.output_losses import Key, name_output, pick

_BY_NAME: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "acc": lambda: Accuracy("acc"),
    "mse": lambda: Mean(find_loss("mse"), "mse"),
    "mae": lambda: Mean(find_loss("mae"), "mae"),
    "mean_squared_error": lambda: Mean(find_loss("mse"), "mean_squared_error"),
    "mean_absolute_error": lambda: Mean(find_loss("mae"), "mean_absolute_error"),
    "root_mean_squared_error": RootMeanSquaredError,
}

# Names that a user of Keras may try.
_CLASSES = {
    "binary_accuracy": "fit.BinaryAccuracy()",
    "precision": "fit.Precision()",
    "recall": "fit.Recall()",
    "top_k_categorical_accuracy": "fit.TopKAccuracy(5)",
    "sparse_top_k_categorical_accuracy": "fit.TopKAccuracy(5)",
    "categorical_accuracy": "'accuracy'",
    "sparse_categorical_accuracy": "'accuracy'",
    "rmse": "'root_mean_squared_error'",
}


def find_metrics(name: str, metrics: Sequence[Any]) -> list[Metric]:
    """Return metrics from names, functions and metrics.

    Raises:
        ArgumentError: A name is unknown, or two metrics have the same name.
        ArgumentTypeError: An entry is not a name, a function or a metric.
    """
    found = []
    for index, entry in enumerate(metrics):
        if isinstance(entry, str):
            if entry not in _BY_NAME:
                raise refuse(
                    f"{name}[{index}]={entry!r}.{_name_near(entry)}",
                    f"The names of metrics are {', '.join(_BY_NAME)}.",
                    "Pass one of these, a function (y_true, y_pred) -> [b], or a fit.Metric.",
                )
            found.append(_BY_NAME[entry]())
        elif isinstance(entry, Metric):
            found.append(entry)
        elif isinstance(entry, type) and issubclass(entry, Metric):
            raise refuse_type(
                f"{name}[{index}]={show(entry)}, a class.",
                f"Entries of {name} are names, functions, and fit.Metric objects.",
                f"Create an object: fit.{entry.__name__}(...).",
            )
        else:
            remedy = "Pass for instance 'accuracy', fit.TopKAccuracy(5), or a function."
            check_callable(entry, f"{name}[{index}]", remedy)
            found.append(Mean(entry))
    names = [metric.name for metric in found]
    twice = sorted({n for n in names if names.count(n) > 1 or n == "loss"})
    if twice:
        raise refuse(
            f"{name} with the names {names}.",
            "Each metric has its own name, and 'loss' is reserved for the loss.",
            f"Give another name to {', '.join(twice)}: fit.Mean(function, 'another name').",
        )
    return found


def _name_near(entry: str) -> str:
    """Return a sentence with the nearest metrics, or an empty string."""
    ways = {name: repr(name) for name in _BY_NAME} | _CLASSES
    near = difflib.get_close_matches(entry.lower(), ways, 3, cutoff=0.6)
    # Several names may mean one metric.
    listed = ", ".join(dict.fromkeys(ways[n] for n in near))
    return f" The nearest: {listed}." if near else ""


def measure_sums(
    metric: Metric, y_true: Any, y_pred: Any, weight: jax.Array, rows: int
) -> dict[str, jax.Array]:
    """Return the sums of a metric, or raise if they are not sums over the examples.

    Raises:
        ArgumentTypeError: They are not a dict of arrays of real numbers.
        ShapeError: A sum has a value for each example.
    """
    found = metric.sums(y_true, y_pred, weight)
    caller = f"fit.Model called the metric {metric.name!r}"
    if not isinstance(found, dict) or not all(map(is_array, found.values())):
        raise ArgumentTypeError(
            f"{caller}, and its sums returned {show(found)}.\n\n"
            "sums returns a dict from names to arrays, each a sum over examples.\n\n"
            "Return for instance {'total': jnp.sum(weight * values), 'count': jnp.sum(weight)}."
        )
    unreal = [n for n, x in found.items() if jnp.issubdtype(x.dtype, jnp.complexfloating)]
    if unreal:
        raise ArgumentTypeError(
            f"{caller}, and its sum {unreal[0]!r} is {found[unreal[0]].dtype}.\n\n"
            "Sums are real numbers; the imaginary part would be lost.\n\n"
            "Return two sums, for instance jnp.sum(values.real) and jnp.sum(values.imag)."
        )
    suspects = [name for name, value in found.items() if rows > 1 and rows in jnp.shape(value)]
    if suspects:
        twice = shapes_of_twice(metric.sums, (y_true, y_pred, weight), rows)
        grown = [n for n in suspects if twice is not None and twice[n] != jnp.shape(found[n])]
        if grown:
            raise ShapeError(
                f"{caller} with {rows} examples, and the sum {grown[0]!r} has the shape "
                f"{list(jnp.shape(found[grown[0]]))}.\n\n"
                "sums returns sums over the examples; their shapes do not depend on the number of "
                "examples.\n\nReturn for instance jnp.sum(weight * values)."
            )
    return {name: jnp.asarray(value) for name, value in found.items()}


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
