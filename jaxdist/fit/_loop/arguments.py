"""Checks the arguments of `fit`, `evaluate` and `predict`: examples in memory, or a dataset."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist._called import called, refuse, refuse_type
from jaxdist._integers import check_fits
from jaxdist._validate import (
    as_integer,
    as_number,
    check_instance,
    check_of_jax,
    format_lines,
    show,
)
from jaxdist.data import Batches, DistributedDataset, batches
from jaxdist.errors import ShapeError
from jaxdist.fit._step.output_losses import ClassWeights

BATCH_SIZE = 32  # as in Keras
MOST = 2**31 - 1  # of epochs and steps


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples in memory; every leaf is `[N, ...]`.

    Attributes:
        x: The inputs of the module.
        y: The targets, or None.
        weight: A weight for each example, or None.
        count: `N`.
    """

    x: Any
    y: Any
    weight: Any
    count: int

    def make_batches(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, first_epoch: int = 0
    ) -> Batches:
        """Return the batches. The order of an epoch depends only on its number and the seed."""
        arrays = (self.x, self.y, self.weight)
        return batches(arrays, batch_size, shuffle=shuffle, seed=seed, first_epoch=first_epoch)

    @called("fit.Model.fit")
    def split(self, fraction: float) -> tuple["Examples", "Examples"]:
        """Return the examples before the last `fraction`, and the rest, as Keras does."""
        first = int(self.count * (1.0 - fraction))
        if not 0 < first < self.count:
            raise refuse(
                f"validation_split={fraction} and {self.count} example(s).",
                f"Both parts need an example; this one would leave {first} to train on.",
                "Pass another validation_split, or validation_data=(x, y).",
            )
        return self._take(slice(None, first)), self._take(slice(first, None))

    def _take(self, rows: slice) -> "Examples":
        x, y, weight = jax.tree.map(lambda leaf: leaf[rows], (self.x, self.y, self.weight))
        return Examples(x, y, weight, len(range(*rows.indices(self.count))))


_NAMES = ("x", "y", "sample_weight")
_OF_VALIDATION = ("validation_data[0]", "validation_data[1]", "validation_data[2]")


def read_examples(
    x: Any, y: Any, weight: Any, *, needs_y: bool = False, of_validation: bool = False
) -> "Examples | None":
    """Return the examples if `x` has arrays, and None if it is a dataset.

    Args:
        x: The inputs, or a dataset.
        y: The targets.
        weight: The weights.
        needs_y: Whether `y` is required.
        of_validation: Whether the arguments are the entries of `validation_data`.

    Raises:
        ArgumentError: A dataset comes with `y` or weights, which its batches must contain.
        ArgumentTypeError: `x` is neither, or a leaf is not an array that JAX has.
        ShapeError: Arrays have different numbers of examples; all are listed.
    """
    names = of_x, of_y, of_weight = _OF_VALIDATION if of_validation else _NAMES
    if is_dataset(x):
        given = [n for n, v in ((of_y, y), (of_weight, weight)) if v is not None]
        if given:
            raise refuse(
                f"a dataset as {of_x}, and {' and '.join(given)}.",
                "The batches of a dataset contain them: (x, y) or (x, y, sample_weight).",
                f"Leave out {' and '.join(given)}.",
            )
        return None
    if x is None:
        raise refuse_type(
            f"{of_x}=None.",
            "x is an array [N, ...], a dict or tuple of arrays, or a dataset of batches.",
            "Pass x.",
        )
    if y is None and needs_y:
        raise refuse_type(
            f"no {of_y}, and the loss compares the outputs of the model with it.",
            "x and y are arrays [N, ...], or dicts or tuples of them.",
            "Pass y; a model that predicts its own input takes y=x.",
        )
    parts = dict(zip(names, (x, y, weight), strict=True))
    for name, part in parts.items():
        if part is not None and not jax.tree.leaves(part):
            raise refuse_type(
                f"{name}={show(part)}, which has no arrays.",
                f"{name} has at least one array, [N, ...].",
                f"Pass {name} with an array.",
            )
    if isinstance(weight, (dict, tuple)):
        raise refuse_type(
            f"{of_weight}={show(weight)}.",
            "It is one array: the weights of the examples, [N], or of the values of the loss.",
            "Pass for instance sample_weight=np.ones(len(y)).",
        )
    arrays = {name: _as_arrays(name, part) for name, part in parts.items()}
    sizes = [
        (f"{name}{keystr(path)}", leaf.shape)
        for name, part in arrays.items()
        for path, leaf in tree_flatten_with_path(part)[0]
    ]
    counts = {shape[0] if shape else 0 for _, shape in sizes}
    if len(counts) != 1 or 0 in counts:
        lines = [f"{name}: {list(shape)}" for name, shape in sizes]
        raise refuse(
            f"arrays with different numbers of examples, or none:\n{format_lines(lines)}",
            "Dim 0 of all arrays is the examples.",
            "Pass arrays of one length, with at least one example.",
            kind=ShapeError,
        )
    return Examples(arrays[of_x], arrays[of_y], arrays[of_weight], counts.pop())


def is_dataset(x: Any) -> bool:
    """Whether `x` is a dataset of batches rather than arrays."""
    if isinstance(x, (Batches, DistributedDataset)):
        return True
    # A set has no order.
    if hasattr(x, "__array__") or isinstance(x, (dict, tuple, str, bytes, int, float, set)):
        return False
    if isinstance(x, list):
        # A list of numbers is an array; a list of pairs is a list of batches.
        return bool(x) and isinstance(x[0], (tuple, dict))
    return isinstance(x, Iterable)


def _as_arrays(name: str, tree: Any) -> Any:

    def convert(path: Any, leaf: Any) -> np.ndarray | jax.Array:
        array = leaf if isinstance(leaf, (np.ndarray, jax.Array)) else np.asarray(leaf)
        if getattr(array.dtype, "kind", "O") in "USOMm":
            raise refuse_type(
                f"{name}{keystr(path)}={show(leaf)}.",
                "Its leaves are arrays of numbers, [N, ...].",
                f"Convert it first: np.asarray({name}, np.float32), or use numbers for strings.",
            )
        check_of_jax(f"{name}{keystr(path)}", array)
        check_fits(f"{name}{keystr(path)}", array)
        return array

    # A list of numbers is one array, not a pytree of scalars.
    if isinstance(tree, list):
        if any(getattr(entry, "ndim", 0) for entry in tree):
            is_x = name in (_NAMES[0], _OF_VALIDATION[0])
            parts = "arguments of the module" if is_x else "targets of several outputs"
            raise refuse_type(
                f"{name}={show(tree)}, a list of arrays.",
                f"It could be the {parts}, or examples.",
                f"Pass tuple({name}) for the {parts}, or np.stack({name}) for examples.",
            )
        return convert((), tree)
    return jax.tree_util.tree_map_with_path(
        convert, tree, is_leaf=lambda node: isinstance(node, list)
    )


def read_class_weight(value: Any) -> ClassWeights | None:
    """Return classes and their weights as arrays, or raise."""
    if value is None:
        return None
    remedy = "Pass for instance class_weight={0: 1.0, 1: 5.0}."
    check_instance("class_weight", value, Mapping, "a dict from class to weight", remedy)
    weights: dict[int, float] = {}
    for label, weight in value.items():
        number = as_integer("a class of class_weight", label, least=0, most=MOST, remedy=remedy)
        name = f"class_weight[{label!r}]"
        weights[number] = as_number(name, weight, least=0.0, example=1.0)
    labels = sorted(weights)
    found = np.array(labels, np.int32), np.array([weights[n] for n in labels], np.float32)
    return found if labels else None


@called("fit.Model.fit")
def unpack_validation(data: Any) -> tuple[Any, Any, Any]:
    """Return `(x, y, sample_weight)` of `validation_data`."""
    if isinstance(data, (tuple, list)) and not is_dataset(data):
        if not 2 <= len(data) <= 3:
            raise refuse(
                f"validation_data with {len(data)} entries.",
                "It is (x, y), (x, y, sample_weight), or a dataset.",
                "Pass validation_data=(x, y).",
            )
        return data[0], data[1], data[2] if len(data) == 3 else None
    if not is_dataset(data):
        raise refuse_type(
            f"validation_data={show(data)}.",
            "It is (x, y), (x, y, sample_weight), or a dataset.",
            "Pass validation_data=(x, y).",
        )
    return data, None, None


def as_batch_size(batch_size: Any, examples: Examples | None) -> int:
    """Return the size of a global batch; a dataset has its own."""
    if batch_size is None:
        return BATCH_SIZE
    size = as_integer("batch_size", batch_size, least=1, example=BATCH_SIZE)
    if examples is None:
        raise refuse(
            f"batch_size={size} and a dataset.",
            "A dataset has batches of its own size.",
            "Leave out batch_size.",
        )
    return size
