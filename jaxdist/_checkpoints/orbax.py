"""Orbax as checkpoints use it: what is written, and how it is read back.

Orbax is imported inside the functions: that takes 0.2 s, and most programs save nothing.
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

_LONGEST_REASON = 300
_STATE, _NOTES, _LEAVES = "state", "notes", "leaves"  # the items of one checkpoint


def open_manager(directory: Path, *, keep: int, clean: bool = False) -> Manager:
    """Orbax's manager of a directory; it has no threads between calls.

    Args:
        directory: Of checkpoints.
        keep: How many.
        clean: Remove what is half written. Only for a writer that is alone.
    """
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        enable_async_checkpointing=False,
        cleanup_tmp_directories=clean,
    )
    return ocp.CheckpointManager(directory, options=options)


def write_checkpoint(manager: Manager, step: int, state: PyTree, notes: Mapping[str, Any]) -> None:
    """Write a checkpoint; it is complete when this returns."""
    import orbax.checkpoint as ocp

    leaves = name_leaves(state)
    records = {name: make_record(leaf) for name, leaf in leaves.items()}
    sums = {"leaves": records, "checksum": compute_json_checksum([records, notes])}
    items = {
        # Orbax refuses arrays without elements; their records say all there is to know.
        _STATE: ocp.args.StandardSave({n: x for n, x in leaves.items() if x.size}),
        _NOTES: ocp.args.JsonSave(notes),
        _LEAVES: ocp.args.JsonSave(sums),
    }
    manager.save(step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


class UnreadableError(ValueError):
    """Raised when a checkpoint is not what was written, whatever Orbax raised."""


def read_notes(manager: Manager, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape, dtype and checksum of each leaf; and the notes.

    Raises:
        UnreadableError: They are not what was written.
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
    """The notes of a checkpoint by reading one file; None where they cannot be read so.

    To import Orbax and to open its manager takes longer than to read them.
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
    """The leaves by name, laid out as `sharding`, or as those wanted where it is None.

    Those named in `own` have that layout in any case.

    Raises:
        UnreadableError: They cannot be read.
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
        # JAX has no array of it, such as of a Python float; it stays with NumPy.
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
        # Orbax leaves the reads that it began beside the failed one; collected here they say
        # nothing, later they would complain on stderr.
        gc.collect()
    raise UnreadableError(why if len(why) <= _LONGEST_REASON else why[:_LONGEST_REASON] + "...")


@contextlib.contextmanager
def _silence_orbax() -> Iterator[None]:
    """Keep Orbax from printing about an error that is ours to tell."""
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logger.setLevel(level)
