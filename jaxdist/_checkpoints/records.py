"""Records of the leaves of a checkpoint: shape, dtype, and a checksum of each shard."""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxdist._buckets import Place
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._processes import Process

Range: TypeAlias = list[list[int]]  # first index and end, for each dim

# Note [Records of shards]
# Each process of a job records the shards that it has, and writes its records into its own file. So
# no process needs the values of another process, and none copies a whole array. Of equal shards,
# only the one with replica id 0 is recorded, since Orbax writes that one.
# A restored array may have another sharding than the saved one. So a checksum belongs to a range of
# indices, and the values in this range are collected from the shards that hold them.


def list_own_shards(
    leaf: Any, shards: Sequence[Any], process: Process
) -> list[tuple[Range, np.ndarray]]:
    """Return the ranges that this process records, and their values on the host.

    Args:
        leaf: An array of JAX or NumPy.
        shards: The `jax.Shard`s of the leaf in this process; empty for a NumPy array.
        process: This process. The first one records NumPy arrays.
    """
    if isinstance(leaf, jax.Array):
        own = [shard for shard in shards if shard.replica_id == 0]
        return [(_get_range(shard.index, leaf.shape), np.asarray(shard.data)) for shard in own]
    return [([[0, n] for n in leaf.shape], leaf)] if process.is_first else []


# The name of a leaf, with its shape, its dtype, and the ranges of this process with their values.
Shards: TypeAlias = Mapping[str, tuple[list[int], str, list[tuple[Range, np.ndarray]]]]


def take_shards(leaves: Mapping[str, Any], process: Process) -> Shards:
    """Copy the shards that this process records to the host."""
    # Keep no references to the arrays themselves, which would keep their memory on the devices.
    taken = {}
    for name, leaf in leaves.items():
        own = list_own_shards(leaf, getattr(leaf, "addressable_shards", ()), process)
        taken[name] = (list(leaf.shape), str(leaf.dtype), own)
    return taken


def make_record(
    shape: Sequence[int], dtype: str, shards: Sequence[tuple[Range, np.ndarray]]
) -> dict[str, Any]:
    """Return the record of a leaf: shape, dtype, and the ranges of its shards with checksums."""
    found = [[where, _compute_checksum(values)] for where, values in shards]
    return {"shape": list(shape), "dtype": dtype, "shards": found}


def format_records(shards: Shards, notes: Mapping[str, Any], process: Process) -> str:
    """Return the file with the records of one process, as JSON."""
    # The records contain the checksums of the arrays. Another checksum protects the records and, in
    # the first process, which writes them, the notes. Other processes may have different notes.
    records = {name: make_record(*parts) for name, parts in shards.items()}
    content = {"processes": process.count, "leaves": records}
    notes = notes if process.is_first else {}
    return json.dumps({**content, "checksum": _compute_json_checksum([content, notes])})


def read_records(folder: Place, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of all processes, by the name of the leaf.

    In each record, "stored" has the process, the number among its shards, and the range of each
    shard.

    Raises:
        UnreadableError: The records or the notes differ from what was written.
    """
    merged: dict[str, Any] = {}
    process, count = 0, 1
    while process < count:
        try:
            part = json.loads((folder / f"process_{process}.json").read_bytes())
        except FileNotFoundError:
            raise UnreadableError(
                f"{folder} has no checksums of process {process} of {count}."
            ) from None
        content = {name: part[name] for name in ("processes", "leaves")}
        # The checksum of the first process includes the notes; that of others does not.
        own_notes = notes if process == 0 else {}
        if part["checksum"] != _compute_json_checksum([content, own_notes]):
            raise UnreadableError("The notes or the checksums are not those that were saved.")
        count = part["processes"]
        for name, record in part["leaves"].items():
            leaf = merged.setdefault(name, {**record, "shards": [], "stored": []})
            leaf["shards"] += record["shards"]
            leaf["stored"] += [[process, i, where] for i, (where, _) in enumerate(record["shards"])]
        process += 1
    return merged


def find_changed_values(records: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each array that differs from its record."""
    return [
        f"The values of {name} are not those that were saved."
        for name, array in arrays.items()
        if not all(_is_unchanged(array, *shard) for shard in records[name]["shards"])
    ]


def _is_unchanged(array: Any, where: Range, checksum: int) -> bool:
    values = read_range(array, where)
    # Values in other processes cannot be compared here, but the manifest compares their files.
    return values is None or _compute_checksum(values) == checksum


def read_range(array: Any, where: Range) -> np.ndarray | None:
    """Return the values in a range; None if this process does not have all of them.

    Cost:
        A copy of the range on the host.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array[_make_slices(where)])
    shape = [stop - start for start, stop in where]
    values, found = np.empty(shape, array.dtype), 0
    # Read equal shards once. The keys are strings, since slices cannot be keys.
    shards = {str(shard.index): shard for shard in array.addressable_shards}
    for shard in shards.values():
        held = _get_range(shard.index, array.shape)
        both = [[max(a, b), min(c, d)] for (a, c), (b, d) in zip(held, where, strict=True)]
        if all(start < stop for start, stop in both):
            part = np.asarray(shard.data)[_make_slices(both, held)]
            values[_make_slices(both, where)] = part
            found += part.size
    return values if found == math.prod(shape) else None


def _get_range(index: Sequence[slice], shape: Sequence[int]) -> Range:
    return [list(part.indices(n)[:2]) for part, n in zip(index, shape, strict=True)]


def _make_slices(where: Range, origin: Range | None = None) -> tuple[slice, ...]:
    """Return the slices of a range in an array that begins at the first indices of `origin`."""
    first = [0] * len(where) if origin is None else [start for start, _ in origin]
    return tuple(slice(a - o, b - o) for (a, b), o in zip(where, first, strict=True))


def _compute_checksum(values: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _compute_json_checksum(value: Any) -> int:
    # Sort the keys, so that the checksum does not depend on their order.
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
