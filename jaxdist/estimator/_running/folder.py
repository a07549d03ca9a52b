"""`ModelFolder`: the checkpoints of a model, and reading them."""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._checkpoints import Checkpoints, list_steps, read_notes_without_orbax, to_plain
from jaxdist.errors import CheckpointError

_CHECKPOINTS, _DELETED = "checkpoints", "deleted."
_KEEP_ALL = (1 << 31) - 1
_LEAVES = "leaves"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CheckpointChoice:
    """A checkpoint of a model.

    Args:
        folder: The folder of the checkpoints.
        step: Its step.
        is_newest: Whether it was chosen as the newest one.
    """

    folder: pathlib.Path
    step: int
    is_newest: bool = False

    @property
    def path(self) -> pathlib.Path:
        """The folder of this checkpoint."""
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
        notes = read_notes_without_orbax(self.path)
        if notes is None or not isinstance(notes.get(_LEAVES), dict):
            raise CheckpointError(
                f"{self.path} is no checkpoint of an Estimator, or it has been deleted.\n\n"
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
        keep_hours: One checkpoint in this many hours is kept for ever.
    """

    def __init__(self, path: pathlib.Path, keep: int | None, keep_hours: float) -> None:
        self.path = path
        self._keep, self._seconds = keep, 3600 * keep_hours
        self._kept_at: float | None = None

    @property
    def checkpoints(self) -> pathlib.Path:
        """The folder of the checkpoints."""
        return self.path / _CHECKPOINTS

    def find_latest(self) -> CheckpointChoice | None:
        """Return the newest checkpoint; None if there is none."""
        steps = list_steps(self.checkpoints)
        return CheckpointChoice(self.checkpoints, steps[-1], is_newest=True) if steps else None

    def open(self) -> Checkpoints:
        """Return the object that writes the checkpoints."""
        # `delete_old` deletes them instead: a checkpoint that is kept for ever is not among the
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
        checkpoints.save(step, state, {_LEAVES: leaves})
        checkpoints.wait_until_finished()

    def delete_old(self) -> None:
        """Delete the checkpoints that are no longer needed."""
        for left in self.checkpoints.glob(f"{_DELETED}*"):
            # An earlier process was killed while it deleted a checkpoint.
            shutil.rmtree(left, ignore_errors=True)
        if self._keep is None:
            return
        for step in list_steps(self.checkpoints)[: -self._keep]:
            folder = self.checkpoints / str(step)
            written = folder.stat().st_mtime
            if self._kept_at is None:
                self._kept_at = self._find_begin()
            if written - self._kept_at >= self._seconds:
                self._kept_at = written
                (folder / _KEPT).touch()
            if (folder / _KEPT).exists():
                continue
            left = self.checkpoints / f"{_DELETED}{step}"
            folder.rename(left)
            shutil.rmtree(left, ignore_errors=True)

    def _find_begin(self) -> float:
        """Return when the last checkpoint that is kept for ever was written, or the first one."""
        folders = [self.checkpoints / str(step) for step in list_steps(self.checkpoints)]
        kept = [f.stat().st_mtime for f in folders if (f / _KEPT).exists()]
        return max(kept) if kept else min((f.stat().st_mtime for f in folders), default=time.time())


_KEPT = "kept_for_ever"


def _find_stored(leaf: Any) -> Any:
    """Return a leaf as a checkpoint stores it: random keys and slice indices are integers."""
    leaf = _compat.unwrap_row_numbers(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf
