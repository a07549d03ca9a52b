"""Saves and loads a model, and resumes a training: its position and states of callbacks."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxdist._buckets import BucketPath, Place, as_place
from jaxdist._called import called, refuse, refuse_type
from jaxdist._checkpoints import Checkpoints
from jaxdist._integers import check_not_masked
from jaxdist._reports import plural
from jaxdist._validate import as_list, format_lines, show
from jaxdist._weights import NO_WEIGHTS
from jaxdist.errors import CheckpointError, ShapeError
from jaxdist.fit._callbacks.base import Callback
from jaxdist.fit._callbacks.saving import ModelCheckpoint, Position
from jaxdist.fit._callbacks.states import join_state, split_state
from jaxdist.fit._loop.progress import Progress

_LOG = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True)
class Start:
    """The position where a training begins.

    Attributes:
        position: The position; with a given `initial_epoch`, only the epoch is known.
        savers: The callbacks that save.
        saver: The one whose checkpoint is resumed; None without a checkpoint.
        saved: The position of that checkpoint, without its arrays.
        continues: Whether the training continues from the checkpoint. An `initial_epoch` of `fit`
            overrides it.
    """

    position: Position
    savers: Sequence[ModelCheckpoint]
    saver: ModelCheckpoint | None = None
    saved: Position | None = None
    continues: bool = False

    @property
    def epoch(self) -> int:
        """The first epoch, from 0."""
        return self.position.epochs

    def tell(self, progress: Progress, epochs: int, *, has_ended: bool) -> None:
        """Print where the training resumes; nothing without a checkpoint."""
        if self.saver is None:
            return
        if has_ended:
            text = f"a callback ended this training after epoch {self.epoch}: nothing is trained"
        elif self.epoch >= epochs:
            text = f"all {epochs} epochs are trained: pass a higher epochs to train more"
        else:
            done = [f"epoch {self.epoch}"] if self.epoch else []
            if self.position.step:
                done.append(f"{plural(self.position.step, 'step')} of epoch {self.epoch + 1}")
            text = f"resumes after {' and '.join(done)}"
        text = f"{text} ({self.saver._directory})"
        _LOG.info("fit: %s.", text)
        progress.say(text)


def find_start(model: Any, callbacks: Sequence[Callback], initial_epoch: int | None) -> Start:
    """Return where a training begins. Changes nothing yet.

    Raises:
        ArgumentError: Two callbacks save into one directory.
        CheckpointError: The training would not begin after all existing checkpoints.
    """
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    folders = [str(saver._directory) for saver in savers]
    twice = next((folder for folder in folders if folders.count(folder) > 1), None)
    if twice is not None:
        raise refuse(
            f"{folders.count(twice)} callbacks ModelCheckpoint with the directory {twice!r}.",
            "Each numbers its checkpoints by epochs or steps, and a directory has one of a number.",
            "Give each its own directory.",
        )
    found = [(saver, saver._read_newest()) for saver in savers]
    resumable = [(s, p) for s, p in found if s._resumes and p is not None]
    if resumable:
        saver, saved = max(resumable, key=lambda pair: (pair[1].epochs, pair[1].step))
        continues = initial_epoch in (None, saved.epochs)
        position = saved if continues else Position(initial_epoch or 0, steps=saved.steps)
        start = Start(position, savers, saver, saved, continues)
    else:
        start = Start(Position(initial_epoch or 0), savers)
    if model.writes_checkpoints:
        for saver in savers:
            saver._check_begin(start.epoch, start.position.steps, resumed=bool(resumable))
    return start


def restore(model: Any, callbacks: Sequence[Callback], start: Start) -> None:
    """Read the checkpoint into the model, and give the callbacks their states.

    Raises:
        CheckpointError: It is of another model or optimizer, or is damaged. Nothing changes then.
    """
    if start.saver is None or start.saved is None:
        return
    saved = start.saver._restore_position(model, start.saved)
    states: dict[str, list[Any]] = {}
    for kind, state in saved.callbacks:
        states.setdefault(kind, []).append(join_state(state, saved.arrays))
    for callback in callbacks:
        if _has_state(callback) and states.get(_name(callback)):
            callback.set_state(states[_name(callback)].pop(0))
    unused = [kind for kind, left in states.items() for _ in left]
    if unused:
        _LOG.info("fit continues without %s, whose state the checkpoint has.", ", ".join(unused))


def describe_states(callbacks: Sequence[Callback]) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Return the class and the state of each callback that has one, and the arrays in them.

    Raises:
        ArgumentTypeError: A state contains what a checkpoint cannot hold.
    """
    arrays: list[Any] = []
    states = [
        (_name(c), split_state(f"{_name(c)}.get_state", c.get_state(), arrays))
        for c in callbacks
        if _has_state(c)
    ]
    return states, arrays


def _has_state(callback: Callback) -> bool:
    return type(callback).get_state is not Callback.get_state


def _name(callback: Callback) -> str:
    return type(callback).__qualname__


@called("fit.Model.save", replaces="training.Checkpoints")
def save(model: Any, directory: str | Place) -> None:
    """Write the model into a directory; `Model.save` documents it."""
    model._check_has_parameters("save")
    notes = {"passes": model._passes, "has_optimizer": model._compiled is not None}
    path = as_place("directory", directory, "runs/model")
    with Checkpoints(path, keep=1) as checkpoints:
        # Each save has the next number: the old one is deleted when the new one is complete.
        number = (checkpoints.steps() or (-1,))[-1] + 1
        checkpoints.save(number, model.objects(), notes)


@called("fit.Model.load", replaces="training.Checkpoints")
def load(model: Any, directory: str | Place) -> None:
    """Read the model from a directory; `Model.load` documents it."""
    model._check_has_parameters("load")
    path = as_place("directory", directory, "runs/model")
    if not isinstance(path, BucketPath) and not path.is_dir():
        raise refuse(
            f"directory={str(directory)!r}, which is not a directory.",
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
    """Return copies of all parameters, statistics and variables of the user's own classes."""
    return [np.array(leaf) for leaf in jax.tree.leaves(_state(module))]


@called("fit.Model.set_weights")
def set_weights(module: nnx.Module, weights: Sequence[Any]) -> None:
    """Set all weights, or raise and set none."""
    state = _state(module)
    paths, tree = tree_flatten_with_path(state)
    remedy = "Pass what model.get_weights() returned."
    arrays = [
        _as_numbers(f"weights[{i}]", weight)
        for i, weight in enumerate(as_list("weights", weights, "a list of arrays", remedy))
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


def _as_numbers(name: str, weight: Any) -> np.ndarray:
    check_not_masked(name, weight)
    array = np.asarray(weight)
    # "V" is the kind of bfloat16.
    if array.dtype.kind not in "fiuV":
        raise refuse_type(
            f"{name}={show(weight)}.",
            "They are arrays of real numbers.",
            "Pass what model.get_weights() returned.",
        )
    return array


def _state(module: nnx.Module) -> Any:
    return nnx.state(module, nnx.Not(nnx.Any(*NO_WEIGHTS)))
