"""Reading of checkpoints: one of a given step, or the newest that is not damaged."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxdist._checkpoints import errors as failures
from jaxdist._checkpoints.files import list_steps
from jaxdist._checkpoints.leaves import list_differences, name_leaves, rebuild_tree
from jaxdist._checkpoints.manifest import find_damage
from jaxdist._checkpoints.objects import rebuild_objects, to_plain
from jaxdist._checkpoints.orbax import read_arrays, read_notes
from jaxdist._checkpoints.pieces import cut_like, get_layouts_of_pieces, get_whole_shapes
from jaxdist._checkpoints.records import find_changed_values
from jaxdist._typing import PyTree
from jaxdist._update import divide_errors, find_moved_pairs
from jaxdist.errors import DamagedCheckpointError


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
        step: The step after which it was saved.
        state: The restored state, with the structure of the requested one.
        notes: The notes that were saved with it.
        set_aside: The new paths of newer checkpoints that are damaged.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    set_aside: tuple[Path, ...] = ()


def restore_step(directory: Path, step: int, like: PyTree, sharding: Sharding | None) -> Restored:
    """Return the checkpoint of a step, with new NNX objects where `like` has NNX objects.

    Raises:
        DamagedCheckpointError: Its files differ from what was written.
        CheckpointError: It does not exist, or is of another model.
    """
    steps = list_steps(directory)
    if step not in steps:
        raise failures.make_missing_error(directory, step, steps)
    try:
        restored = _restore_plain(directory, step, to_plain(like), sharding)
    except failures.UnreadableError as error:
        before = [s for s in steps if s < step]
        # None: the error of Orbax names its internals, and its reason is in the text.
        raise failures.make_damage_error(directory, step, before, list(error.args)) from None
    return dataclasses.replace(restored, state=rebuild_objects(like, restored.state))


def _restore_plain(directory: Path, step: int, like: PyTree, sharding: Sharding | None) -> Restored:
    # First of all, since it alone can name the damaged file. See Note [Complete or absent].
    _raise_if_any(find_damage(directory, step))
    wanted = name_leaves(get_whole_shapes(like))
    records, notes = read_notes(directory / str(step))
    shapes = {name: np.shape(leaf) for name, leaf in wanted.items()}
    saved = {name: tuple(record["shape"]) for name, record in records.items()}
    pairs = find_moved_pairs(saved, shapes)
    # Read these with the shapes that were saved; `divide_errors` then gives them the shapes of this
    # run.
    moved = {name for pair in pairs for name in pair}
    wanted.update((n, jax.ShapeDtypeStruct(saved[n], records[n]["dtype"])) for n in moved)
    problems = list_differences(records, wanted)
    if problems:
        raise failures.make_mismatch_error(directory, step, problems)
    layouts = {n: s for n, s in get_layouts_of_pieces(like).items() if n not in moved}
    arrays = read_arrays(directory / str(step), wanted, sharding, layouts)
    _raise_if_any(find_changed_values(records, arrays))
    divide_errors(arrays, pairs, shapes)
    return Restored(step, cut_like(rebuild_tree(arrays, get_whole_shapes(like)), like), notes)


def restore_newest(
    directory: Path, like: PyTree, sharding: Sharding | None, skip_damaged: bool
) -> Restored | None:
    """Return the newest checkpoint; None if the directory has none.

    With `skip_damaged`, it is the newest that is not damaged, and the damaged ones are moved away.
    """
    damaged: list[int] = []
    steps = list_steps(directory)
    for step in reversed(steps):
        try:
            restored = restore_step(directory, step, like, sharding)
        except DamagedCheckpointError:
            # The oldest is the last that could be restored: report it, and move nothing.
            if not skip_damaged or step == steps[0]:
                raise
            damaged.append(step)
            continue
        moved = tuple(_move_damaged(directory, step) for step in damaged)
        return dataclasses.replace(restored, set_aside=moved)
    return None


def _move_damaged(directory: Path, step: int) -> Path:
    target = directory / failures.DAMAGED / str(step)
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    (directory / str(step)).rename(target)
    return target


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise failures.UnreadableError(*problems)
