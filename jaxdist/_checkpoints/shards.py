"""Writes the shards of a checkpoint with tensorstore, and reads any part of an array of them.

The shards of a process are arrays in one OCDBT database, which packs them into few objects. Each
shard is an array of its own, so processes share nothing, and a reader of a slice reads the chunks
that overlap it.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._buckets import OCDBT_CACHE, BucketPath, Place, make_bucket_error, make_context
from jaxdist._checkpoints.as_bytes import name_stored_dtype, view_real, view_stored
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._checkpoints.records import Shards

_CHUNK_BYTES = 1 << 26
_READ_BYTES = 1 << 30  # at once


def start_shards(folder: Place, shards: Shards, process: int) -> Callable[[], None]:
    """Start to write the shards of a process, and return a function that waits for that.

    Args:
        folder: The folder of the arrays of all processes.
        shards: The shards on the host. They must not change until the function returns.
        process: The number of this process, among those that write.
    """
    import tensorstore

    # All of them or none, in one commit.
    transaction = tensorstore.Transaction()
    done = []
    for name, (_, dtype, own) in shards.items():
        for number, (_, values) in enumerate(own):
            if values.size:
                database, spec = folder / f"process_{process}", _describe(values.shape, dtype)
                path = f"{name}/{number}"
                array = _open(database, "zarr3", path, spec, transaction=transaction).result()
                stored = view_stored(values)
                done.append(array.write(stored, can_reference_source_data_indefinitely=True))
    done.append(transaction.commit_async())

    def wait() -> None:
        with _name_errors(folder):
            for future in done:
                future.result()

    return wait


def _describe(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return the description of a shard, which is part of the format of checkpoints.

    It is not stored: to look for it would take a request for each shard.
    """
    row = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    chunk = [min(shape[0], max(1, _CHUNK_BYTES // row)), *shape[1:]] if shape else []
    return {
        "assume_metadata": True,
        "metadata": {
            "shape": list(shape),
            "data_type": name_stored_dtype(dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        # Otherwise an array of -0.0 would be left out, and read as 0.0, as would a missing chunk.
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


def _open(database: Place, driver: str, path: str, spec: dict[str, Any], **options: Any) -> Any:
    """Start to open an array in an OCDBT database, and return a future."""
    import tensorstore

    if isinstance(database, BucketPath):
        base = database.get_spec()
    else:
        base = {"driver": "file", "path": f"{database}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{path}/", **_DATABASE}
    options.setdefault("context", make_context())
    with _name_errors(database):
        return tensorstore.open({"driver": driver, "kvstore": store, **spec}, **options)


# Note [Requests of a restore]
# Each array is opened on its own, and would look by a request whether its database has changed. A
# restore has a cache of its own instead, so what is there was read since it began: no checkpoint
# is written while it is complete. All reads are started before one is waited for, so that one
# request reads many neighbours.


def read_shards(
    folder: Place, records: Mapping[str, Any], target: Mapping[str, Any], is_orbax: bool
) -> dict[str, Any]:
    """Return arrays by name; each device gets its slices, and other parts are not read.

    See Note [Requests of a restore].

    Args:
        folder: The folder of the arrays.
        records: The record of each array.
        target: For each name a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array.
        is_orbax: Whether Orbax has written the arrays.

    Raises:
        UnreadableError: An array cannot be read.
        BucketError: The bucket cannot be read.
    """
    import tensorstore

    context = tensorstore.Context(OCDBT_CACHE, parent=make_context())
    opening = {
        name: [_open(folder, "zarr", name, _CACHED, context=context)]
        if is_orbax
        else _open_parts(folder, name, records[name], context)
        for name in target
    }
    found: dict[str, Any] = {}
    reads: deque[_Read] = deque()
    size = 0
    for name, wanted in target.items():
        record = None if is_orbax else records[name]
        with _name_errors(folder):
            parts = [future.result() for future in opening.pop(name)]
            reads.append(_Read(name, wanted, _join(parts, record)))
        size += reads[-1].size
        while size > _READ_BYTES:
            read = reads.popleft()
            size -= read.size
            found[read.name] = read.finish(folder)
    return found | {read.name: read.finish(folder) for read in reads}


_CACHED = {"recheck_cached_metadata": False, "recheck_cached_data": False}


class _Read:
    """The slices of an array that this process needs, which are being read.

    Args:
        name: Its name.
        wanted: As in `read_shards`.
        array: The array of tensorstore.
    """

    def __init__(self, name: str, wanted: Any, array: Any) -> None:
        self.name, self._wanted = name, wanted
        if isinstance(wanted, np.ndarray):
            indices = [tuple(slice(0, n) for n in wanted.shape)]
        else:
            devices = wanted.sharding.addressable_devices_indices_map(wanted.shape)
            indices = list(devices.values())
        slices = {str(index): index for index in indices}
        parts = {key: array[index] if wanted.shape else array for key, index in slices.items()}
        self.size = sum(part.size for part in parts.values()) * np.dtype(wanted.dtype).itemsize
        self._slices = {key: part.read() for key, part in parts.items()}

    def finish(self, folder: Place) -> Any:
        """Wait for the slices, and return the array of JAX or NumPy."""
        wanted = self._wanted
        read = {}
        with _name_errors(folder):
            for key, slices in self._slices.items():
                read[key] = view_real(slices.result(), wanted.dtype)
        if isinstance(wanted, np.ndarray):
            return next(iter(read.values()))
        return jax.make_array_from_callback(
            wanted.shape, wanted.sharding, lambda index: read[str(index)], dtype=wanted.dtype
        )


def _open_parts(folder: Place, name: str, record: Mapping[str, Any], context: Any) -> list[Any]:
    """Start to open the shards of all processes."""
    parts = []
    for process, number, where in record["stored"]:
        spec = _describe([last - first for first, last in where], record["dtype"])
        database, path = folder / f"process_{process}", f"{name}/{number}"
        parts.append(_open(database, "zarr3", path, {**spec, **_CACHED}, context=context))
    return parts


def _join(parts: Sequence[Any], record: Mapping[str, Any] | None) -> Any:
    """Return an array of tensorstore that consists of shards; of one part if it has no record."""
    import tensorstore

    if record is None:
        return parts[0]
    placed = []
    for part, (_, _, where) in zip(parts, record["stored"], strict=True):
        start = tuple(first for first, _ in where)
        placed.append(part[tensorstore.d[:].translate_to[start]] if start else part)
    return tensorstore.overlay(placed)


@contextlib.contextmanager
def _name_errors(folder: Place) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        text = str(error)
        if isinstance(folder, BucketPath) and any(word in text for word in _OF_THE_STORE):
            raise make_bucket_error(folder, error) from error
        raise UnreadableError(text.partition(" [")[0][:_LONGEST_REASON]) from error


_OF_THE_STORE = (
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",
    "NoSuchBucket",
)
_LONGEST_REASON = 300  # characters
# An object is uploaded by one request. If it is cut off, the whole object is sent again.
_DATABASE = {
    "target_data_file_size": 1 << 28,
    "cache_pool": "cache_pool#ocdbt",
    # Neighbours in an object are read by one request.
    "experimental_read_coalescing_threshold_bytes": 1 << 20,
    "experimental_read_coalescing_merged_bytes": 1 << 28,
    "experimental_read_coalescing_interval": "10ms",
}
