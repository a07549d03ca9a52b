"""The parts of a checkpoint (arrays, notes, checksums): written by each process, and read."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxdist._buckets import BucketPath, Place
from jaxdist._checkpoints.as_bytes import clear_unused_bits
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._checkpoints.files import read_dict
from jaxdist._checkpoints.opening import open_storage
from jaxdist._checkpoints.orbax import read_stored
from jaxdist._checkpoints.records import format_records, read_records, take_shards
from jaxdist._checkpoints.shards import read_shards
from jaxdist._checkpoints.storage import (
    LEAVES,
    METADATA,
    NOTES,
    STATE,
    Storage,
)
from jaxdist._processes import Process
from jaxdist.errors import BucketError


def start_part(
    storage: Storage,
    name: str,
    leaves: Mapping[str, Any],
    notes: Mapping[str, Any],
    process: Process,
    writer: int,
) -> Callable[[], None]:
    """Copy the shards of this process to the host, and start to write them.

    Args:
        storage: The checkpoints.
        name: The folder, from `Storage.prepare`.
        leaves: Arrays over all processes; for other arrays, the first process writes its own.
        notes: Notes of the checkpoint; the first process writes them.
        process: This process, among those that write.
        writer: JAX's index of the process that writes the parts common to all.

    Returns:
        A function that waits until the shards are written.
    """
    folder = storage.directory / name
    leaves = {name: _to_shared(leaf, process) for name, leaf in leaves.items()}
    shards = take_shards(leaves, process)
    # Orbax rejects arrays without elements. Their shape and dtype are in the records.
    stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
    finish = storage.start_arrays(folder, stored, shards, process.index, writer)

    def complete() -> None:
        finish()
        text = format_records(shards, notes, process)
        (folder / LEAVES / f"process_{process.index}.json").write_bytes(text.encode())
        if process.is_first:
            (folder / NOTES / "metadata").write_bytes(json.dumps(notes).encode())

    return complete


def _to_shared(leaf: Any, process: Process) -> Any:
    # Orbax rejects arrays of one process in a job of several processes. Copy NumPy arrays, since
    # the caller may change them afterwards.
    is_shared = isinstance(leaf, jax.Array) and (
        process.count == 1 or not leaf.is_fully_addressable
    )
    return leaf if is_shared else clear_unused_bits(np.array(leaf))


def read_notes(folder: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the records of the leaves, and the notes of a checkpoint.

    Raises:
        UnreadableError: The records or the notes differ from what was written.
    """
    notes = read_dict(folder / NOTES / "metadata")
    if notes is None:
        raise UnreadableError("The notes cannot be read.")
    try:
        return read_records(folder / LEAVES, notes), notes
    except BucketError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnreadableError(f"The checksums cannot be read: {error}") from error


def read_saved_notes(directory: Place, step: int) -> dict[str, Any] | None:
    """Return the notes of a checkpoint from their file; None if the file cannot be read."""
    return read_dict(open_storage(directory).find_folder(step) / NOTES / "metadata")


def read_arrays(
    folder: Place,
    records: Mapping[str, Any],
    wanted: Mapping[str, Any],
    sharding: Sharding | None,
    own: Mapping[str, Sharding],
) -> dict[str, Any]:
    """Return the leaves of a checkpoint by name, with their shardings.

    Args:
        folder: The folder of the checkpoint.
        records: The records of all leaves.
        wanted: Shapes and dtypes, by name.
        sharding: The sharding of each leaf; None takes that of the leaf in `wanted`.
        own: Shardings by name that take precedence over `sharding`.

    Raises:
        UnreadableError: The leaves cannot be read.
        BucketError: The bucket cannot be read.
    """
    one_device = SingleDeviceSharding(jax.local_devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=own.get(name) or sharding or getattr(x, "sharding", None) or one_device,
        )
        if jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype
        # JAX has no arrays of this dtype (float64 without x64, for a Python float): use NumPy.
        else np.empty(x.shape, x.dtype)
        for name, x in wanted.items()
    }
    stored = {name: x for name, x in target.items() if x.size}
    is_orbax = (folder / METADATA).exists()
    if is_orbax and not isinstance(folder, BucketPath):
        read = read_stored(folder / STATE, stored)
    else:
        read = read_shards(folder / STATE, records, stored, is_orbax)
    return {name: read[name] if x.size else _make_empty(x) for name, x in target.items()}


def _make_empty(wanted: jax.ShapeDtypeStruct | np.ndarray) -> Any:
    if isinstance(wanted, np.ndarray):
        return wanted
    return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)
