"""Writes the parts of a checkpoint into a folder with a temporary name, and publishes it."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist._checkpoints.files import (
    TEMPORARY,
    delete_step,
    list_steps,
    remove_manifest,
    write_manifest,
)
from jaxdist._checkpoints.orbax import (
    LEAVES,
    NOTES,
    STATE,
    list_stored_names,
    merge_arrays,
    start_arrays,
)
from jaxdist._checkpoints.records import format_records, prepare_records
from jaxdist._processes import Process

_METADATA = json.dumps({"item_handlers": {}, "metrics": {}, "performance_metrics": {}})


def prepare_folder(directory: Path, step: int, mark: str) -> Path:
    """Delete partly written checkpoints, and make the folder of a new one.

    Args:
        directory: The directory of the checkpoints. No other job writes into it.
        step: The step of the checkpoint.
        mark: A part of the folder's name.
    """
    for left in directory.glob(f"*.{TEMPORARY}*"):
        shutil.rmtree(left)
    folder = directory / f"{step}.{TEMPORARY}-{mark}"
    # In Orbax, all processes wait for process 0 to make the last one, even if it has ended.
    for part in (STATE, NOTES, LEAVES, f"{STATE}/array_metadatas"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    return folder


def start_part(
    folder: Path,
    leaves: Mapping[str, Any],
    notes: Mapping[str, Any],
    process: Process,
    writer: int,
) -> Callable[[], None]:
    """Copy the shards of this process to the host, and start to write them.

    Args:
        folder: The folder from `prepare_folder`.
        leaves: Arrays over all processes; for other arrays, the first process writes its own.
        notes: Notes of the checkpoint; the first process writes them.
        process: This process, among those that write.
        writer: JAX's index of the process that writes the parts common to all.

    Returns:
        A function that waits until the shards are written.
    """
    leaves = {name: _to_shared(leaf) for name, leaf in leaves.items()}
    compute_records = prepare_records(leaves, process)
    stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
    finish = start_arrays(folder / STATE, stored, writer)

    def complete() -> None:
        finish()
        text = format_records(compute_records(), notes, process)
        (folder / LEAVES / f"process_{process.index}.json").write_text(text)
        if process.is_first:
            (folder / NOTES / "metadata").write_text(json.dumps(notes))

    return complete


def _to_shared(leaf: Any) -> Any:
    # Orbax rejects arrays of one process in a job of several processes.
    is_shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return leaf if is_shared else np.array(leaf)


def _check_names(folder: Path) -> None:
    """Check that each leaf in the records was written, before the checkpoint counts."""
    recorded = json.loads(next((folder / LEAVES).glob("*.json")).read_bytes())["leaves"]
    wanted = {n for n, record in recorded.items() if math.prod(record["shape"])}
    missing = sorted(wanted - list_stored_names(folder / STATE))
    if missing:
        raise OSError(f"Orbax has not written {len(missing)} leaves, such as {missing[0]}")


def publish(directory: Path, folder: Path, step: int, keep: int, writer: int) -> None:
    """Give a checkpoint that all processes have written its final name; delete the oldest ones."""
    merge_arrays(folder / STATE, writer)
    _check_names(folder)
    # Orbax logs a warning if a folder lacks this file.
    (folder / "_CHECKPOINT_METADATA").write_text(_METADATA)
    remove_manifest(directory, step)
    # See Note [Complete or absent].
    folder.rename(directory / str(step))
    for old in list_steps(directory)[:-keep]:
        delete_step(directory, old)
    write_manifest(directory, step)
