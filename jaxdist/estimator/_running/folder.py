"""The checkpoints of a model: reading, writing, and warm starts from those of another."""

import dataclasses
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxdist import _compat
from jaxdist._buckets import BucketPath, Place, as_place
from jaxdist._called import call_as, called, name_call, refuse
from jaxdist._checkpoints import (
    Checkpoints,
    delete_step,
    find_folder,
    list_steps,
    put_into,
    read_saved_notes,
    replace_file,
    to_plain,
)
from jaxdist._validate import check_instance, check_text
from jaxdist.errors import CheckpointError, ShapeError
from jaxdist.estimator._model.building import Built

_CHECKPOINTS, _DELETED = "checkpoints", "deleted."
_KEEP_ALL = (1 << 31) - 1
_LEAVES, _TIME = "leaves", "time"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CheckpointChoice:
    """A checkpoint of a model.

    Args:
        folder: The folder of the checkpoints.
        step: Its step.
        is_newest: Whether it was chosen as the newest one.
    """

    folder: Place
    step: int
    is_newest: bool = False

    @property
    def path(self) -> Place:
        """The folder of this checkpoint; in a bucket the address that names it."""
        return self.folder / str(self.step)

    def follow(self, read: Callable[["CheckpointChoice"], T]) -> tuple["CheckpointChoice", T]:
        """Call `read` with this checkpoint, or with a newer one if this one has been deleted.

        A job deletes old checkpoints, even while they are read. A checkpoint that the user named
        is not replaced.

        Returns:
            The checkpoint that was read, and the result of `read`.
        """
        choice = self
        while True:
            try:
                return choice, read(choice)
            except CheckpointError:
                steps = list_steps(choice.folder)
                if not choice.is_newest or choice.step in steps or not steps:
                    raise
                choice = dataclasses.replace(choice, step=steps[-1])

    def read_leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype of each array in the checkpoint, by name.

        Raises:
            CheckpointError: No estimator wrote this checkpoint, or it has been deleted.
        """
        notes = read_saved_notes(self.folder, self.step)
        if notes is None or not isinstance(notes.get(_LEAVES), dict):
            raise CheckpointError(
                f"{self.path} is not a checkpoint of an Estimator, or it has been deleted.\n\n"
                "An Estimator reads the checkpoints that an Estimator has saved.\n\n"
                "Pass the path that Estimator.latest_checkpoint() returns."
            )
        return {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (dtype, shape) in notes[_LEAVES].items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Write the values of the checkpoint into a state, which may be a part of it.

        Raises:
            CheckpointError: It is of another model. The state then does not change.
        """
        others = {
            name: leaf
            for name, leaf in self.read_leaves().items()
            if name.split(".")[0] not in state
        }
        with Checkpoints(self.folder) as checkpoints:
            checkpoints.restore({**state, **others}, step=self.step)

    @called("Estimator.get_variable_value")
    def read(self, name: str) -> Any:
        """Return one array.

        Raises:
            CheckpointError: No array has this name.
        """
        leaves = self.read_leaves()
        if name not in leaves:
            raise refuse(
                f"name={name!r}, and {self.path} has no such variable.",
                f"It has {', '.join(sorted(leaves))}.",
                "Pass one of these names.",
                kind=CheckpointError,
            )
        with Checkpoints(self.folder) as checkpoints:
            return checkpoints.restore(self.step, like=leaves).state[name]


class ModelFolder:
    """The checkpoints of a model.

    Args:
        path: The model's folder.
        keep: How many of the newest checkpoints to keep; None for all.
        keep_hours: One checkpoint in this many hours is kept forever.
    """

    def __init__(self, path: Place, keep: int | None, keep_hours: float) -> None:
        self.path = path
        self._keep, self._seconds = keep, 3600 * keep_hours
        self._kept_at: float | None = None
        self._kept: set[int] = set()

    @property
    def checkpoints(self) -> Place:
        """The folder of the checkpoints."""
        return self.path / _CHECKPOINTS

    def find_latest(self) -> CheckpointChoice | None:
        """Return the newest checkpoint; None if there is none."""
        steps = list_steps(self.checkpoints)
        return CheckpointChoice(self.checkpoints, steps[-1], is_newest=True) if steps else None

    def open(self) -> Checkpoints:
        """Return the object that writes the checkpoints."""
        # `delete_old` deletes them instead: a checkpoint that is kept forever is not among the
        # newest.
        return Checkpoints(self.checkpoints, keep=_KEEP_ALL)

    def save(self, checkpoints: Checkpoints, step: int, state: Mapping[str, Any]) -> None:
        """Save a checkpoint, and wait until it is on disk."""
        flat, _ = tree_flatten_with_path(to_plain(dict(state)))
        leaves = {}
        for path, leaf in flat:
            array = jax.eval_shape(_find_stored, leaf)
            name = keystr(path, simple=True, separator=".")
            leaves[name] = [str(array.dtype), list(array.shape)]
        checkpoints.save(step, state, {_LEAVES: leaves, _TIME: time.time()})
        checkpoints.wait_until_finished()

    def delete_old(self) -> None:
        """Delete the checkpoints that are no longer needed."""
        if isinstance(self.checkpoints, pathlib.Path):
            for left in self.checkpoints.glob(f"{_DELETED}*"):
                # An earlier process was killed while it deleted a checkpoint.
                shutil.rmtree(left, ignore_errors=True)
        if self._keep is None:
            return
        for step in list_steps(self.checkpoints)[: -self._keep]:
            if step in self._kept:
                continue
            mark = find_folder(self.checkpoints, step) / _KEPT
            written = self._find_time(step)
            if self._kept_at is None:
                self._kept_at = self._find_begin()
            if written is not None and written - self._kept_at >= self._seconds:
                self._kept_at = written
                replace_file(mark, b"1")
            if mark.exists():
                self._kept.add(step)
            else:
                _delete(self.checkpoints, step)

    def _find_time(self, step: int) -> float | None:
        """Return when a checkpoint was written; None if it does not say."""
        if isinstance(self.checkpoints, pathlib.Path):
            return (self.checkpoints / str(step)).stat().st_mtime
        written = (read_saved_notes(self.checkpoints, step) or {}).get(_TIME)
        return written if isinstance(written, float) else None

    def _find_begin(self) -> float:
        """Return when the last checkpoint that is kept forever was written, or the first one."""
        times = {step: self._find_time(step) for step in list_steps(self.checkpoints)}
        known = {step: written for step, written in times.items() if written is not None}
        kept = [
            written
            for step, written in known.items()
            if (find_folder(self.checkpoints, step) / _KEPT).exists()
        ]
        return max(kept) if kept else min(known.values(), default=time.time())


_KEPT = "kept_for_ever"


def _delete(directory: Place, step: int) -> None:
    if isinstance(directory, BucketPath):
        delete_step(directory, step)
        return
    left = directory / f"{_DELETED}{step}"
    (directory / str(step)).rename(left)
    shutil.rmtree(left, ignore_errors=True)


def _find_stored(leaf: Any) -> Any:
    """Return a leaf as a checkpoint stores it: random keys and slice indices are integers."""
    leaf = _compat.unwrap_row_numbers(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


class WarmStartSettings(NamedTuple):
    """Which initial values a model takes from the checkpoint of another one. A named tuple.

    Args:
        ckpt_to_initialize_from: The folder of a model, or a checkpoint in it.
        vars_to_warm_start: A regular expression. A variable of a module is taken if it matches the
            whole name, such as `model.dense.kernel`.
        var_name_to_prev_var_name: Names in the checkpoint by names in the model, where they
            differ.

    Example:
        >>> jaxdist.estimator.WarmStartSettings("runs/a", r"model\\.dense.*").vars_to_warm_start
        'model\\\\.dense.*'

    Source:
        `tf.estimator.WarmStartSettings`.
    """

    ckpt_to_initialize_from: Any
    vars_to_warm_start: str = ".*"
    var_name_to_prev_var_name: dict[str, str] | None = None


def read_settings(given: Any) -> WarmStartSettings | None:
    """Return the settings from the argument `warm_start_from`.

    Raises:
        ArgumentTypeError: The value is of the wrong type.
        ArgumentError: The path is empty, or the pattern is not valid.
    """
    if given is None:
        return None
    if isinstance(given, WarmStartSettings):
        name = "ckpt_to_initialize_from"
        return call_as("estimator.WarmStartSettings", _check_settings, given, name)
    return _check_settings(WarmStartSettings(given), "warm_start_from")


def _check_settings(settings: WarmStartSettings, name: str) -> WarmStartSettings:
    as_place(name, settings.ckpt_to_initialize_from, "runs/a")
    check_text("vars_to_warm_start", settings.vars_to_warm_start, ".*")
    try:
        re.compile(settings.vars_to_warm_start)
    except re.error as error:
        raise refuse(
            f"vars_to_warm_start={settings.vars_to_warm_start!r}: {error}.",
            "It is a regular expression, which the whole name of a variable matches.",
            "Pass for instance vars_to_warm_start=r'model\\.dense.*'.",
        ) from None
    names = settings.var_name_to_prev_var_name
    if names is not None:
        remedy = "Pass {'model.kernel': 'model.dense.kernel'}."
        check_instance("var_name_to_prev_var_name", names, dict, "a dict of names", remedy)
    return settings


def find_checkpoint(path: Any) -> CheckpointChoice:
    """Return the checkpoint of a path: the folder of a model, or a checkpoint itself.

    Raises:
        CheckpointError: There is no checkpoint at the path.
        BucketError: The bucket does not exist, or cannot be read.
    """
    caller = name_call()
    folder = as_place("path", path, "runs/a")
    # A model may be in a folder whose name is a number.
    latest = ModelFolder(folder, None, 1).find_latest()
    if latest is None and folder.name.isdecimal():
        step = int(folder.name)
        if step in list_steps(folder.parent):
            return CheckpointChoice(folder.parent, step)
    if latest is None:
        if isinstance(folder, BucketPath):
            folder.check_bucket()
        raise CheckpointError(
            f"{caller} found no checkpoint in {path}.\n\n"
            "A checkpoint is a folder that is named after its step, in the folder 'checkpoints' of "
            "a model.\n\nPass what Estimator.latest_checkpoint() returns, or train first."
        )
    return latest


def _read_all(choice: CheckpointChoice) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return shapes and values of all arrays of a checkpoint."""
    leaves = choice.read_leaves()
    with Checkpoints(choice.folder) as checkpoints:
        return leaves, checkpoints.restore(choice.step, like=leaves).state


def warm_start(settings: WarmStartSettings, built: Built) -> None:
    """Write values of another checkpoint into the modules of a model.

    Raises:
        CheckpointError: The checkpoint does not exist, or lacks a variable.
        ShapeError: A variable has another shape in the checkpoint.
        ArgumentError: The pattern matches no variable.
    """
    caller = "Estimator.train"
    given = settings.ckpt_to_initialize_from
    choice = call_as(
        f"estimator.WarmStartSettings was given ckpt_to_initialize_from={given!r}, and",
        find_checkpoint,
        given,
    )
    target = {"modules": built.modules}
    flat, treedef = tree_flatten_with_path(to_plain(target))
    choice, (leaves, saved) = choice.follow(_read_all)
    values: list[Any] = []
    taken = 0
    for path, leaf in flat:
        name = keystr(path, simple=True, separator=".").removeprefix("modules.")
        if not re.fullmatch(settings.vars_to_warm_start, name):
            values.append(leaf)
            continue
        taken += 1
        before = (settings.var_name_to_prev_var_name or {}).get(name, name)
        found = saved.get(f"modules.{before}")
        if found is None:
            raise CheckpointError(
                f"{caller}: warm_start_from names {choice.path}, which has no variable "
                f"{before!r}.\n\nIt has {', '.join(sorted(_list_names(leaves)))}.\n\n"
                f"Pass var_name_to_prev_var_name={{{name!r}: ...}}, or leave the variable out of "
                "vars_to_warm_start."
            )
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ShapeError(
                f"{caller}: {name!r} is {leaf.dtype}{list(leaf.shape)}, and {before!r} in "
                f"{choice.path} is {found.dtype}{list(found.shape)}.\n\n"
                "A variable takes its first value from one of the same shape and dtype.\n\n"
                "Leave the variable out of vars_to_warm_start."
            )
        values.append(found)
    if not taken:
        raise call_as(
            "estimator.WarmStartSettings",
            refuse,
            f"vars_to_warm_start={settings.vars_to_warm_start!r}, which matches no variable.",
            "The model has "
            f"{', '.join(keystr(p, simple=True, separator='.')[8:] for p, _ in flat)}.",
            "Pass for instance '.*', which matches all.",
        )
    put_into(target, tree_unflatten(treedef, values))


def _list_names(leaves: Any) -> list[str]:
    return [n.removeprefix("modules.") for n in leaves if n.startswith("modules.")]
