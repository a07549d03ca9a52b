"""The losses of `compile`, one or one for each output, and the weights of classes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._called import called, refuse, refuse_type
from jaxdist._validate import as_number, is_array, show
from jaxdist.errors import ArgumentError, ShapeError
from jaxdist.fit._step.losses import (
    CALLER,
    Loss,
    align,
    as_classes,
    find_loss,
    measure_examples,
    sum_weighted,
)

# The key of an output in the dict, list or tuple that the model returns.
Key = str | int


@dataclasses.dataclass(frozen=True)
class OutputLoss:
    """A loss and the output that it is for.

    Attributes:
        key: The key of the output; None for everything that the model returns.
        function: A function of `(y_true, y_pred)`.
        weight: Its factor in the total.
    """

    key: Key | None
    function: Loss
    weight: float = 1.0


class Losses:
    """The losses of a model, and their weighted sum.

    Args:
        entries: One loss without a key, or one for each output that has a loss.
        count: How many outputs the model returns; None if `compile` did not get a list.
    """

    def __init__(self, entries: Sequence[OutputLoss], count: int | None = None) -> None:
        self._entries, self._count = tuple(entries), count

    @property
    def names(self) -> dict[str, str]:
        """The name of each output's loss in the logs; empty for a single loss, as in Keras."""
        if len(self._entries) == 1:
            return {}
        return {name_output(e.key): f"{name_output(e.key)}_loss" for e in self._entries}

    @called("fit.Model")
    def sum_all(
        self, y: Any, outputs: Any, weight: jax.Array | None, counts: jax.Array | None, rows: int
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the total over the examples of this replica, and the part of each output.

        `weight` is the weight of the examples. Without it `counts` is used, 0 for padding.

        Raises:
            ArgumentTypeError: The values of a loss are integers or bools.
            ArgumentError: The model returns more or fewer outputs than the list of losses has.
        """
        if isinstance(outputs, (list, tuple)) and self._count not in (None, len(outputs)):
            raise refuse(
                f"a list of losses with {self._count} entries in compile, and a model that returns "
                f"{len(outputs)} outputs.",
                "A list has one entry for each output.",
                "Give the outputs without a loss an entry of None.",
            )
        total: Any = 0.0
        parts: dict[str, jax.Array] = {}
        for entry in self._entries:
            what, of_entry = "the loss", (y, outputs)
            if entry.key is not None:
                what = f"the loss of the output {entry.key!r}"
                of_entry = pick(what, "y", y, entry.key), pick(what, "outputs", outputs, entry.key)
            values = measure_examples(what, entry.function, *align(*of_entry), rows)
            if not jnp.issubdtype(values.dtype, jnp.floating):
                raise refuse_type(
                    f"{what} whose values are {values.dtype}.",
                    "A loss is real numbers that change with the parameters: the gradient of "
                    "integers and bools is 0, so nothing would be trained.",
                    "Pass it in metrics, and a loss such as "
                    "optax.softmax_cross_entropy_with_integer_labels.",
                )
            part = sum_weighted(values, counts if weight is None else _fit(what, values, weight))
            total = total + (part if entry.weight == 1.0 else entry.weight * part)
            if self.names:
                parts[name_output(entry.key)] = part
        return total, parts


@called(CALLER)
def find_losses(loss: Any, loss_weights: Any) -> Losses:
    """Return the losses of `compile(loss=, loss_weights=)`.

    Raises:
        ArgumentError: No output has a loss, or the weights are for other outputs.
        ArgumentTypeError: A loss or a weight is of the wrong type.
    """
    entries = _entries_of(loss)
    if entries is None:
        if loss_weights is not None:
            raise refuse(
                f"loss_weights={show(loss_weights)} and one loss.",
                "loss_weights has a number for each loss of a model with several outputs.",
                "Multiply in the loss, or pass loss={'a': ..., 'b': ...}.",
            )
        return Losses([OutputLoss(None, find_loss(loss))])
    found = {key: find_loss(entry) for key, entry in entries.items() if entry is not None}
    if not found:
        raise refuse(
            f"loss={show(loss)}.",
            "At least one output has a loss; None is for those without.",
            "Pass for instance loss={'a': 'mse'}.",
        )
    names = [name_output(key) for key in found]
    if len({*names}) < len(names):
        raise refuse(
            f"losses of the outputs {list(found)}, which have the names {', '.join(names)}.",
            "Each output has its own name in the logs, or its losses would be two values of one "
            "name.",
            "Give the outputs other keys.",
        )
    weights = _find_weights(loss_weights, found, entries)
    count = len(loss) if isinstance(loss, (list, tuple)) else None
    made = [OutputLoss(key, function, weights[key]) for key, function in found.items()]
    return Losses(made, count)


def _entries_of(given: Any) -> dict[Key, Any] | None:
    """Return the entries of a dict, list or tuple by the key of their output."""
    if isinstance(given, Mapping):
        return dict(given)
    return dict(enumerate(given)) if isinstance(given, (list, tuple)) else None


@called(CALLER)
def _find_weights(
    loss_weights: Any, found: Mapping[Key, Loss], entries: Mapping[Key, Any]
) -> dict[Key, float]:
    if loss_weights is None:
        return dict.fromkeys(found, 1.0)
    given = _entries_of(loss_weights)
    if given is None:
        raise refuse_type(
            f"loss_weights={show(loss_weights)}.",
            "It is a dict or a list of numbers, like loss.",
            f"Pass for instance loss_weights={dict.fromkeys(found, 1.0)}.",
        )
    if given.keys() not in (found.keys(), entries.keys()):
        raise refuse(
            f"loss_weights of the outputs {list(given)}, and losses of {list(found)}.",
            "Each output with a loss has a weight, and no other output does.",
            f"Pass for instance loss_weights={dict.fromkeys(found, 1.0)}.",
        )
    return {key: as_number(f"loss_weights[{key!r}]", given[key]) for key in found}


def name_output(key: Key | None) -> str:
    """Return the name of an output in logs: its key, or `output_0` for the first of a list."""
    return f"output_{key}" if isinstance(key, int) else str(key)


def pick(what: str, where: str, tree: Any, key: Key) -> Any:
    """Return the output of a key from the outputs of a model, or from its targets.

    Raises:
        ArgumentError: There is no output with this key.
    """
    entries = _entries_of(tree)
    if entries is None or key not in entries:
        name = "y" if where == "y" else "what the model returns"
        has = show(tree) if entries is None else f"a {type(tree).__name__} with {list(entries)}"
        raise ArgumentError(
            f"fit.Model looked for {what}: {name} is {has}.\n\n"
            "With several losses or metrics by output, the model returns a dict, a list or a "
            "tuple, and y has the same keys.\n\n"
            f"Give {name} the key {key!r}, or pass the existing keys to compile."
        )
    return entries[key]


def _fit(what: str, losses: jax.Array, weight: jax.Array) -> jax.Array:
    """Return weights for the values of a loss.

    Raises:
        ShapeError: The dims of the weights are not the first dims of the values.
    """
    if weight.shape == (*losses.shape, 1):
        weight = weight[..., 0]
    if weight.shape != losses.shape[: weight.ndim]:
        raise refuse(
            f"sample_weight of local shape {list(weight.shape)}, and {what} has values of local "
            f"shape {list(losses.shape)}.",
            "A weight belongs to an example, [N], or has the first dims of the values of the loss.",
            f"Pass sample_weight with {losses.ndim} dims or fewer, such as [N].",
            kind=ShapeError,
        )
    return weight


# Classes in ascending order, and their weights.
ClassWeights = tuple[np.ndarray, np.ndarray]


@called("fit.Model")
def weigh_classes(classes: Any, y: Any, outputs: Any, weight: Any) -> jax.Array:
    """Return the weight of each example or value: that of its class, times its own.

    Shapes:
        In: `y` and `outputs` as for `_find_labels`; `weight` `[b, ...]` or None.
        Out: `[b, ...]`, with the dims of the labels or of the weights, whichever are more.

    Raises:
        ArgumentTypeError: There is more than one array of targets.
        ShapeError: The targets are not classes of these outputs, or their dims do not fit those of
            the weights.
    """
    labels = as_classes(_find_labels(y, outputs))
    known, weights = jnp.asarray(classes[0]), jnp.asarray(classes[1])
    at = jnp.clip(jnp.searchsorted(known, labels), 0, known.size - 1)
    # A class that is not in `class_weight` has weight 1.
    found = jnp.where(known[at] == labels, weights[at], 1.0)
    if weight is None:
        return found
    weight = jnp.asarray(weight)
    most = max(found.ndim, weight.ndim)
    parts = [a.reshape(a.shape + (1,) * (most - a.ndim)) for a in (found, weight)]
    shared = min(found.ndim, weight.ndim)
    if found.shape[:shared] != weight.shape[:shared]:
        raise refuse(
            f"sample_weight of local shape {list(weight.shape)}, and class_weight with classes of "
            f"local shape {list(found.shape)}.",
            "The weight of an example is that of its class, times its own.",
            "Pass sample_weight with the dims of the classes, or [N].",
            kind=ShapeError,
        )
    return parts[0] * parts[1]


def _find_labels(y: Any, outputs: Any) -> jax.Array:
    """Return the classes of the targets.

    Shapes:
        In: `outputs` `[b, ..., class]` and `y` `[b, ...]`, `[b, ..., 1]` or one-hot; or, for a
            binary decision, both `[b]` or `[b, 1]`.
    """
    if not is_array(y):
        raise refuse_type(
            f"class_weight, and targets y that are {show(y)}.",
            "Weights of classes need one array of classes.",
            "Pass sample_weight instead.",
        )
    if y.ndim > 1 and y.shape[-1] == 1:
        return y[..., 0]
    if not is_array(outputs) or outputs.ndim == 0:
        # As in Keras, which ignores the outputs here.
        return y if y.ndim == 1 else jnp.argmax(y, axis=-1)
    if y.ndim > 1 and y.shape == outputs.shape:
        return jnp.argmax(y, axis=-1)
    if y.shape in (outputs.shape, outputs.shape[:-1]):
        return y
    raise refuse(
        f"class_weight, targets y of local shape {list(y.shape)}, and outputs of the model of "
        f"local shape {list(outputs.shape)}.",
        "Targets have the dims of the outputs without the last one, or are one-hot.",
        "Pass y as classes, or sample_weight instead of class_weight.",
        kind=ShapeError,
    )
