"""Calls of Orbax: how a checkpoint is written and read.

The functions import Orbax when they are called. The import takes 0.2 s, and most programs save
nothing.
"""

import contextlib
import gc
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist._checkpoints.leaves import compute_json_checksum, make_record, name_leaves
from jaxdist._typing import PyTree

Manager: TypeAlias = Any  # orbax.checkpoint.CheckpointManager

_LONGEST_REASON = 300  # characters
_STATE, _NOTES, _LEAVES = "state", "notes", "leaves"  # the items of one checkpoint


def open_manager(directory: Path, *, keep: int, clean: bool = False) -> Manager:
    """Open Orbax's manager of a directory; it has no threads between calls.

    Args:
        directory: The directory of the checkpoints.
        keep: How many checkpoints to keep.
        clean: Remove partly written checkpoints. Pass true only if no other job writes here.
    """
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        # `save` returns when the files are complete, so nothing needs to wait at exit.
        enable_async_checkpointing=False,
        cleanup_tmp_directories=clean,
    )
    return ocp.CheckpointManager(directory, options=options)


def write_checkpoint(manager: Manager, step: int, state: PyTree, notes: Mapping[str, Any]) -> None:
    """Write a checkpoint. It is complete when the function returns."""
    import orbax.checkpoint as ocp

    leaves = name_leaves(state)
    records = {name: make_record(leaf) for name, leaf in leaves.items()}
    # The records contain the checksums of the arrays. The second checksum protects the records and
    # the notes themselves.
    sums = {"leaves": records, "checksum": compute_json_checksum([records, notes])}
    items = {
        # Orbax refuses arrays without elements. Their shape and dtype are in the records.
        _STATE: ocp.args.StandardSave({n: x for n, x in leaves.items() if x.size}),
        _NOTES: ocp.args.JsonSave(notes),
        _LEAVES: ocp.args.JsonSave(sums),
    }
    manager.save(step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


class UnreadableError(ValueError):
    """A checkpoint differs from what was written, or Orbax could not read it."""


def read_notes(manager: Manager, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return shape, dtype and checksum of each leaf, and the notes.

    Raises:
        UnreadableError: They differ from what was written.
    """
    import orbax.checkpoint as ocp

    items = {_LEAVES: ocp.args.JsonRestore(), _NOTES: ocp.args.JsonRestore()}
    read = _restore_items(manager, step, items)
    sums, notes = read[_LEAVES], read[_NOTES]
    if not isinstance(sums, dict) or sums.keys() != {"leaves", "checksum"}:
        raise UnreadableError("The checksums are not those that were saved.")
    if sums["checksum"] != compute_json_checksum([sums["leaves"], notes]):
        raise UnreadableError("The notes or the checksums are not those that were saved.")
    return sums["leaves"], notes


def read_notes_without_orbax(folder: Path) -> dict[str, Any] | None:
    """Return the notes of a checkpoint from one file; None if this file cannot be read.

    Importing Orbax and opening its manager would take longer than reading the notes.
    """
    try:
        found = json.loads((folder / _NOTES / "metadata").read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def read_arrays(
    manager: Manager,
    step: int,
    wanted: Mapping[str, Any],
    sharding: Sharding | None,
    own: Mapping[str, Sharding],
) -> dict[str, Any]:
    """Return the leaves by name, with their shardings.

    Args:
        manager: Of the directory.
        step: The step of the checkpoint.
        wanted: Shapes and dtypes, by name.
        sharding: The sharding of each leaf; None takes the sharding of the wanted leaf.
        own: Shardings by name that take precedence over `sharding`.

    Raises:
        UnreadableError: The leaves cannot be read.
    """
    import orbax.checkpoint as ocp

    one_device = SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=own.get(name) or sharding or getattr(x, "sharding", None) or one_device,
        )
        if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
        # JAX has no array of this dtype (float64 without x64, for a Python float): read into NumPy.
        else np.empty(x.shape, x.dtype)
        for name, x in wanted.items()
    }
    stored = {name: x for name, x in target.items() if x.size}
    read = _restore_items(manager, step, {_STATE: ocp.args.StandardRestore(stored)})[_STATE]
    return {name: read[name] if x.size else _make_empty(x) for name, x in target.items()}


def _make_empty(wanted: jax.ShapeDtypeStruct | np.ndarray) -> Any:
    if isinstance(wanted, np.ndarray):
        return wanted
    return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)


def _restore_items(manager: Manager, step: int, items: Mapping[str, Any]) -> Any:
    import orbax.checkpoint as ocp

    with _silence_orbax():
        try:
            return manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).split('. See full')[0]}"
        # Orbax abandons the other reads that it started. When they are collected, each reports an
        # error on stderr. So collect them here, where `_silence_orbax` suppresses that.
        gc.collect()
    raise UnreadableError(why if len(why) <= _LONGEST_REASON else why[:_LONGEST_REASON] + "...")


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Suppress the messages of Orbax about an error that jaxdist reports itself."""
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)
