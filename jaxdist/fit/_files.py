"""Saves and loads a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import Checkpoints
from jaxdist._validate import as_list, as_path, format_lines, show
from jaxdist.errors import CheckpointError, ShapeError


@called("fit.Model.save", replaces="training.Checkpoints")
def save(model: Any, directory: str | Path) -> None:
    """Write the model into a directory; `Model.save` documents it."""
    notes = {"passes": model._passes, "has_optimizer": model._compiled is not None}
    path = Path(as_path("directory", directory, "runs/model"))
    with Checkpoints(path, keep=1) as checkpoints:
        # Each save has the next number: the old one is deleted when the new one is complete.
        number = (checkpoints.steps() or (-1,))[-1] + 1
        checkpoints.save(number, model.objects(), notes)


@called("fit.Model.load", replaces="training.Checkpoints")
def load(model: Any, directory: str | Path) -> None:
    """Read the model from a directory; `Model.load` documents it."""
    path = Path(as_path("directory", directory, "runs/model"))
    if not path.is_dir():
        raise refuse(
            f"directory={str(directory)!r}, which is no directory.",
            "It is a directory that fit.Model.save wrote.",
            "Check the path.",
            kind=CheckpointError,
        )
    with Checkpoints(path, keep=1) as checkpoints:
        restored = checkpoints.restore(model.objects())
    if restored is None:
        raise refuse(
            f"directory={str(directory)!r}, which has no model.",
            "It is a directory that fit.Model.save wrote.",
            "Check the path.",
            kind=CheckpointError,
        )
    model._passes = restored.notes.get("passes", 0)


def get_weights(module: nnx.Module) -> list[np.ndarray]:
    """Return copies of all parameters and statistics."""
    return [np.array(leaf) for leaf in jax.tree.leaves(_state(module))]


@called("fit.Model.set_weights")
def set_weights(module: nnx.Module, weights: Sequence[Any]) -> None:
    """Set all parameters and statistics, or raise and set none."""
    state = _state(module)
    paths, tree = tree_flatten_with_path(state)
    remedy = "Pass what model.get_weights() returned."
    arrays = [
        _as_numbers(weight) for weight in as_list("weights", weights, "a list of arrays", remedy)
    ]
    wrong = [
        f"{keystr(path)}: {list(array.shape)} for {list(old.shape)}"
        for (path, old), array in zip(paths, arrays, strict=False)
        if array.shape != old.shape
    ]
    if wrong or len(arrays) != len(paths):
        found = f"weights with {len(arrays)} array(s) for {len(paths)}"
        raise refuse(
            found + (":\n" + format_lines(wrong) if wrong else "."),
            "They have the order and the shapes of get_weights.",
            "Pass what get_weights of a model of the same class and sizes returned.",
            kind=ShapeError,
        )
    new = [
        jax.device_put(jnp.asarray(array, old.dtype), old.sharding)
        for (_, old), array in zip(paths, arrays, strict=True)
    ]
    nnx.update(module, tree_unflatten(tree, new))


def _as_numbers(weight: Any) -> np.ndarray:
    array = np.asarray(weight)
    # "V" is the kind of bfloat16.
    if array.dtype.kind not in "fiuV":
        raise refuse_type(
            f"weights with {show(weight)}.",
            "They are arrays of real numbers.",
            "Pass what model.get_weights() returned.",
        )
    return array


def _state(module: nnx.Module) -> Any:
    # Without random streams: their keys are not NumPy arrays.
    return nnx.state(module, (nnx.Param, nnx.BatchStat))
