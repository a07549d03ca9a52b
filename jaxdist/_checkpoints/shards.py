"""Writes the shards of a checkpoint with tensorstore, and reads any part of an array of them.

The shards of a process are arrays in one OCDBT database, which packs them into few objects. Each
shard is an array of its own, so processes share nothing, and a reader of a slice reads the chunks
that overlap it.
"""

import concurrent.futures
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._buckets import BucketPath, Place, make_bucket_error, make_context
from jaxdist._checkpoints.errors import UnreadableError
from jaxdist._checkpoints.records import Shards

_CHUNK_BYTES = 1 << 26
_READERS = 8  # arrays at once


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
                array = _open(database, "zarr3", path, spec, transaction=transaction)
                stored = values.view(np.uint8) if dtype in _AS_BYTES else values
                done.append(array.write(stored, can_reference_source_data_indefinitely=True))
    done.append(transaction.commit_async())

    def wait() -> None:
        with _name_errors(folder):
            for future in done:
                future.result()

    return wait


# NumPy has a byte for each of their elements, and tensorstore does not know them.
_AS_BYTES = ("uint4", "uint2")


def _describe(shape: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return the description of a shard, which is part of the format of checkpoints.

    It is not stored: to look for it would take a request for each shard.
    """
    stored = "uint8" if dtype in _AS_BYTES else dtype
    row = math.prod(shape[1:]) * np.dtype(dtype).itemsize
    chunk = [min(shape[0], max(1, _CHUNK_BYTES // row)), *shape[1:]] if shape else []
    return {
        "assume_metadata": True,
        "metadata": {
            "shape": list(shape),
            "data_type": stored,
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
    """Open an array in an OCDBT database."""
    import tensorstore

    if isinstance(database, BucketPath):
        base = database.get_spec()
    else:
        base = {"driver": "file", "path": f"{database}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{path}/", **_DATABASE}
    with _name_errors(database):
        options["context"] = make_context()
        return tensorstore.open({"driver": driver, "kvstore": store, **spec}, **options).result()


def read_shards(
    folder: Place, records: Mapping[str, Any], target: Mapping[str, Any], is_orbax: bool
) -> dict[str, Any]:
    """Return arrays by name; each device gets its slices, and other parts are not read.

    Args:
        folder: The folder of the arrays.
        records: The record of each array.
        target: For each name a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array.
        is_orbax: Whether Orbax has written the arrays.

    Raises:
        UnreadableError: An array cannot be read.
        BucketError: The bucket cannot be read.
    """

    def read(name: str) -> Any:
        wanted = target[name]
        array = _open_orbax(folder, name) if is_orbax else _open_whole(folder, name, records[name])

        @functools.cache
        def read_slices(key: str) -> np.ndarray:
            with _name_errors(folder):
                part = array[slices[key]] if wanted.shape else array
                values = part.read().result()
            return values.view(wanted.dtype) if str(wanted.dtype) in _AS_BYTES else values

        if isinstance(wanted, np.ndarray):
            slices = {"": tuple(slice(0, n) for n in wanted.shape)}
            return read_slices("")
        indices = wanted.sharding.addressable_devices_indices_map(wanted.shape)
        slices = {str(index): index for index in indices.values()}
        return jax.make_array_from_callback(
            wanted.shape, wanted.sharding, lambda index: read_slices(str(index)), dtype=wanted.dtype
        )

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(target, pool.map(read, target), strict=True))


def _open_orbax(folder: Place, name: str) -> Any:
    return _open(folder, "zarr", name, {})


def _open_whole(folder: Place, name: str, record: Mapping[str, Any]) -> Any:
    """Return an array of tensorstore that consists of the shards of all processes."""
    import tensorstore

    parts = []
    for process, number, where in record["stored"]:
        spec = _describe([last - first for first, last in where], record["dtype"])
        part = _open(folder / f"process_{process}", "zarr3", f"{name}/{number}", spec)
        start = tuple(first for first, _ in where)
        parts.append(part[tensorstore.d[:].translate_to[start]] if start else part)
    return tensorstore.overlay(parts)


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
    "experimental_read_coalescing_interval": "1ms",
}
