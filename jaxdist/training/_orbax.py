"""Orbax as checkpoints use it: what is written, and how it is read back.

Orbax is imported inside the functions: that takes 0.2 s, and most programs save nothing.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist._typing import PyTree
from jaxdist.training._saved_leaves import json_checksum, named_leaves, record_of

Manager: TypeAlias = Any  # orbax.checkpoint.CheckpointManager

_STATE, _NOTES, _LEAVES = "state", "notes", "leaves"  # the items of one checkpoint


def open_manager(directory: Path, *, keep: int) -> Manager:
    """Orbax's manager of a directory; it has no threads between calls."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(directory, options=options)


def write(manager: Manager, step: int, state: PyTree, notes: Mapping[str, Any]) -> None:
    """Write a checkpoint; it is complete when this returns."""
    import orbax.checkpoint as ocp

    leaves = named_leaves(state)
    records = {name: record_of(leaf) for name, leaf in leaves.items()}
    sums = {"leaves": records, "checksum": json_checksum([records, notes])}
    items = {
        _STATE: ocp.args.StandardSave(leaves),
        _NOTES: ocp.args.JsonSave(notes),
        _LEAVES: ocp.args.JsonSave(sums),
    }
    manager.save(step, args=ocp.args.Composite(**items), force=True)
    manager.wait_until_finished()


def read_notes(manager: Manager, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shape, dtype and checksum of each leaf; and the notes.

    Raises:
        ValueError: They are not what was written. Orbax raises much else.
    """
    import orbax.checkpoint as ocp

    items = {_LEAVES: ocp.args.JsonRestore(), _NOTES: ocp.args.JsonRestore()}
    with _quiet():
        read = manager.restore(step, args=ocp.args.Composite(**items))
    records, notes = read[_LEAVES]["leaves"], read[_NOTES]
    if read[_LEAVES]["checksum"] != json_checksum([records, notes]):
        raise ValueError("the notes or the checksums are not those that were saved")
    return records, notes


def read_arrays(
    manager: Manager, step: int, wanted: Mapping[str, Any], sharding: Sharding | None
) -> dict[str, Any]:
    """The leaves by name, laid out as `sharding`, or as those wanted where it is None."""
    import orbax.checkpoint as ocp

    one_device = SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding or getattr(x, "sharding", None) or one_device
        )
        for name, x in wanted.items()
    }
    with _quiet():
        items = {_STATE: ocp.args.StandardRestore(target)}
        read = manager.restore(step, args=ocp.args.Composite(**items))[_STATE]
    return {name: read[name] for name in wanted}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax from printing the traceback of an error that is ours to tell."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
