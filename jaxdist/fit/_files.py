"""Saves and loads a model."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxdist._checkpoints import Checkpoints
from jaxdist._validate import CallerRename, as_list, as_path, format_lines, show
from jaxdist.errors import ArgumentTypeError, CheckpointError, ShapeError


def save(model: Any, directory: str | Path) -> None:
    """Write the model into a directory; `Model.save` documents it."""
    notes = {"passes": model._passes, "has_optimizer": model._compiled is not None}
    path = Path(as_path("fit.Model.save", "directory", directory, "runs/model"))
    with _rename("save"), Checkpoints(path, keep=1) as checkpoints:
        # Each save has the next number: the old one is deleted when the new one is complete.
        number = (checkpoints.steps() or (-1,))[-1] + 1
        checkpoints.save(number, model.objects(), notes)


def load(model: Any, directory: str | Path) -> None:
    """Read the model from a directory; `Model.load` documents it."""
    path = Path(as_path("fit.Model.load", "directory", directory, "runs/model"))
    if not path.is_dir():
        raise CheckpointError(
            f"fit.Model.load was given directory={str(directory)!r}, which is no directory.\n\n"
            "It is a directory that fit.Model.save wrote.\n\nCheck the path."
        )
    with _rename("load"), Checkpoints(path, keep=1) as checkpoints:
        restored = checkpoints.restore(model.objects())
    if restored is None:
        raise CheckpointError(
            f"fit.Model.load was given directory={str(directory)!r}, which has no model.\n\n"
            "It is a directory that fit.Model.save wrote.\n\nCheck the path."
        )
    model._passes = restored.notes.get("passes", 0)


@contextlib.contextmanager
def _rename(method: str) -> Iterator[None]:
    with CallerRename("training.Checkpoints", f"fit.Model.{method}"):
        yield


def get_weights(module: nnx.Module) -> list[np.ndarray]:
    """Return copies of all parameters and statistics."""
    return [np.array(leaf) for leaf in jax.tree.leaves(_state(module))]


def set_weights(module: nnx.Module, weights: Sequence[Any]) -> None:
    """Set all parameters and statistics, or raise and set none."""
    state = _state(module)
    paths, tree = tree_flatten_with_path(state)
    caller, remedy = "fit.Model.set_weights", "Pass what model.get_weights() returned."
    arrays = [
        _as_numbers(weight)
        for weight in as_list(caller, "weights", weights, "a list of arrays", remedy)
    ]
    wrong = [
        f"{keystr(path)}: {list(array.shape)} for {list(old.shape)}"
        for (path, old), array in zip(paths, arrays, strict=False)
        if array.shape != old.shape
    ]
    if wrong or len(arrays) != len(paths):
        raise ShapeError(
            f"fit.Model.set_weights was given weights with {len(arrays)} array(s) for {len(paths)}"
            + (":\n" + format_lines(wrong) if wrong else ".")
            + "\n\nThey have the order and the shapes of get_weights.\n\n"
            "Pass what get_weights of a model of the same class and sizes returned."
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
        raise ArgumentTypeError(
            f"fit.Model.set_weights was given weights with {show(weight)}.\n\n"
            "They are arrays of real numbers.\n\nPass what model.get_weights() returned."
        )
    return array


def _state(module: nnx.Module) -> Any:
    # Without random streams: their keys are not NumPy arrays.
    return nnx.state(module, (nnx.Param, nnx.BatchStat))
