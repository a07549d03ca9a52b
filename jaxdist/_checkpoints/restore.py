"""Reads a checkpoint: that of a given step, or the newest that is not damaged."""

import dataclasses
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding

from jaxdist._buckets import Place
from jaxdist._checkpoints import errors as failures
from jaxdist._checkpoints.group import Group, agree_on_result, check_same_steps
from jaxdist._checkpoints.leaves import (
    cut_like,
    get_layouts_of_pieces,
    get_whole_shapes,
    list_differences,
    name_leaves,
    rebuild_objects,
    rebuild_tree,
    to_plain,
)
from jaxdist._checkpoints.parts import read_arrays, read_notes
from jaxdist._checkpoints.records import find_changed_values
from jaxdist._checkpoints.stacks import (
    choose_saved_layout,
    find_form,
    find_stacks,
    restack,
    suggest_pattern,
)
from jaxdist._checkpoints.storage import Storage
from jaxdist._typing import PyTree
from jaxdist._update import divide_errors, find_moved_pairs
from jaxdist.errors import BucketError, CheckpointError, DamagedCheckpointError

# Note [A checkpoint that is deleted while it is read]
# A job may delete an old checkpoint while another process reads it. The deletion begins with a
# rename, so the reader fails to open its next file, and the step is no longer in the list. Such a
# checkpoint is missing, not damaged. A reader that wants the newest reads the list again.


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint.

    Attributes:
        step: The step after which it was saved.
        state: The restored state, with the structure of the requested one.
        notes: The notes that were saved with it.
        set_aside: The new paths of newer, damaged checkpoints.
    """

    step: int
    state: PyTree
    notes: dict[str, Any]
    set_aside: tuple[Place, ...] = ()


def restore_step(
    storage: Storage,
    step: int,
    like: PyTree,
    sharding: Sharding | None,
    group: Group | None,
    stacks: str | None = None,
) -> Restored:
    """Return the checkpoint of a step, with new NNX objects where `like` has NNX objects.

    If one process of a group cannot read it, all raise an error.

    Raises:
        DamagedCheckpointError: The files differ from what was written.
        CheckpointError: The checkpoint does not exist, or is of another model.
        OtherProcessError: Another process of the job did not answer, or has ended.
    """
    directory, steps = storage.directory, storage.list_steps()
    plain = to_plain(like)

    def read() -> _Arrays:
        if step not in steps:
            raise failures.make_missing_error(directory, step, steps)
        try:
            return _read_arrays(storage, step, plain, sharding, stacks)
        except failures.UnreadableError as error:
            if step not in (left := storage.list_steps()):
                raise failures.make_missing_error(directory, step, left) from None
            before = [s for s in steps if s < step]
            # `from None`: the error of Orbax names its internals, and our message has its reason.
            raise failures.make_damage_error(directory, step, before, list(error.args)) from None

    arrays, pairs, shapes, moved, notes = (
        read() if group is None else agree_on_result(group, f"restore(step={step})", read)
    )
    # From here on collectives are allowed: all processes have read their arrays.
    divide_errors(arrays, pairs, shapes)
    for name, layout in moved.items():
        arrays[name] = restack(arrays[name], shapes[name], layout)
    whole = rebuild_tree(arrays, get_whole_shapes(plain))
    return Restored(step, rebuild_objects(like, cut_like(whole, plain)), notes)


# The arrays with the shapes that were saved, what `divide_errors` needs of them, the layouts of
# stacks that get another form, and the notes.
_Arrays: TypeAlias = tuple[
    dict[str, Any], Any, dict[str, tuple[int, ...]], dict[str, Sharding | None], dict[str, Any]
]


def _read_arrays(
    storage: Storage, step: int, like: PyTree, sharding: Sharding | None, stacks: str | None
) -> _Arrays:
    # Do this first, since only the manifest can name a damaged file. See Note [Complete or absent].
    _raise_if_any(storage.find_damage(step))
    wanted = name_leaves(get_whole_shapes(like))
    folder = storage.find_folder(step)
    records, notes = read_notes(folder)
    shapes = {name: np.shape(leaf) for name, leaf in wanted.items()}
    saved = {name: tuple(record["shape"]) for name, record in records.items()}
    pairs = find_moved_pairs(saved, shapes)
    # Read these with the saved shapes; `divide_errors` then gives them the shapes of this run.
    moved = {name for pair in pairs for name in pair}
    wanted.update((n, jax.ShapeDtypeStruct(saved[n], records[n]["dtype"])) for n in moved)
    layouts = {n: s for n, s in get_layouts_of_pieces(like).items() if n not in moved}
    # See Note [Stacks are named by the caller].
    restacked = find_stacks(stacks, get_whole_shapes(like), saved, shapes)
    final: dict[str, Sharding | None] = {}
    for name, shape in restacked.items():
        own = getattr(wanted[name], "sharding", None)
        final[name] = layouts.get(name) or sharding or own
        wanted[name] = jax.ShapeDtypeStruct(shape, wanted[name].dtype)
        if (before := choose_saved_layout(shape, shapes[name], final[name])) is not None:
            layouts[name] = before
    problems = list_differences(records, wanted)
    if problems:
        pattern = _suggest_stacks(like, records, wanted, saved)
        raise failures.make_mismatch_error(storage.directory, step, problems, pattern)
    arrays = read_arrays(folder, records, wanted, sharding, layouts)
    _raise_if_any(find_changed_values(records, arrays))
    return arrays, pairs, shapes, final, notes


def _suggest_stacks(like: PyTree, records: Any, wanted: Any, saved: Any) -> str | None:
    """Return the pattern of all leaves that differ, if they may be stacks in other chunks."""
    if records.keys() != wanted.keys():
        return None
    if any(record["dtype"] != str(wanted[name].dtype) for name, record in records.items()):
        return None
    other = {n: (saved[n], tuple(x.shape)) for n, x in wanted.items() if saved[n] != x.shape}
    if find_form([*other.values()]) is None:
        return None
    return suggest_pattern([*other], get_whole_shapes(like))


def restore_newest(
    storage: Storage,
    like: PyTree,
    sharding: Sharding | None,
    skip_damaged: bool,
    group: Group | None,
    stacks: str | None = None,
) -> Restored | None:
    """Return the newest checkpoint; None if the directory has none.

    With `skip_damaged`, return the newest that is not damaged, and move the damaged ones away.
    See Note [A checkpoint that is deleted while it is read].
    """
    damaged: list[int] = []
    steps = storage.list_steps()
    if group is not None:
        check_same_steps(group, "Checkpoints.restore", storage.directory, steps)
    for step in reversed(steps):
        try:
            restored = restore_step(storage, step, like, sharding, group, stacks)
        except BucketError:
            raise
        except DamagedCheckpointError:
            # If even the oldest checkpoint is damaged, report it, and move nothing.
            if not skip_damaged or step == steps[0]:
                raise
            damaged.append(step)
            continue
        except CheckpointError:
            # Processes that read together must use one list, so they do not try again.
            if group is not None or storage.list_steps() == steps:
                raise
            return restore_newest(storage, like, sharding, skip_damaged, group, stacks)
        moved = tuple(_move_damaged(storage, step, group) for step in damaged)
        return dataclasses.replace(restored, set_aside=moved)
    return None


def _move_damaged(storage: Storage, step: int, group: Group | None) -> Place:
    if group is None:
        storage.set_aside(step)
    else:
        # No process may list the steps before the checkpoint is moved.
        act = group.only_first(lambda: storage.set_aside(step))
        agree_on_result(group, "Checkpoints.restore", act)
    return storage.get_damaged(step)


def _raise_if_any(problems: list[str]) -> None:
    if problems:
        raise failures.UnreadableError(*problems)
