"""Saves tables of a model in files next to its checkpoints, a few rows at a time."""

import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdist._values import IndexedSlices, Scatter
from jaxdist.errors import CheckpointError, ShapeError

# A part of a table in memory. `jaxdist._checkpoints` would need memory for the whole table.
_PART_BYTES = 2**25


class TableFiles:
    """The tables of a job on parameter servers, with one `.npy` file for each table and step.

    The notes of a checkpoint have the checksums of its tables. A file whose step has no complete
    checkpoint is never read.

    Args:
        directory: The directory of the checkpoints.
        tables: The variables by name.
    """

    def __init__(self, directory: Path, tables: Mapping[str, Any]) -> None:
        self._folder, self._tables = directory / "tables", tables

    def save(self, step: int) -> dict[str, dict[str, Any]]:
        """Write the tables of a step; return the checksums for the notes of its checkpoint."""
        if not self._tables:
            return {}
        new = self._folder / f".{step}.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        found = {}
        for name, table in self._tables.items():
            with (new / f"{name}.npy").open("wb") as file:
                found[name] = {"shape": list(table.shape), "crc32": _write(file, table)}
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(self._folder / str(step), ignore_errors=True)
        new.rename(self._folder / str(step))
        return found

    def load(self, step: int, notes: Mapping[str, Mapping[str, Any]]) -> None:
        """Send the rows of a step to the servers.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for name, table in self._tables.items():
            path = self._folder / str(step) / f"{name}.npy"
            try:
                # Check this first, so that a damaged file changes nothing.
                with path.open("rb") as file:
                    crc = 0
                    for _, _, rows in _read(file, table):
                        crc = zlib.crc32(rows.data, crc)
                wanted = notes.get(name, {}).get("crc32")
                problem = f"its checksum is {crc}, and it was {wanted}" if crc != wanted else ""
            except (OSError, ValueError) as error:
                problem = str(error)
            if problem:
                raise CheckpointError(
                    f"The table {name!r} of step {step} cannot be read from {path}: {problem}.\n\n"
                    "A checkpoint with a table counts only with the file of its table.\n\n"
                    f"Delete the checkpoint {step}, to resume from the one before, or use another "
                    "checkpoint.directory."
                )
            with path.open("rb") as file:
                for shard, ids, rows in _read(file, table):
                    shard.change_rows(Scatter.UPDATE, IndexedSlices(rows, ids))

    def remove_but(self, steps: Sequence[int]) -> None:
        """Remove the files of all other steps."""
        kept = set(map(str, steps))
        for path in self._folder.iterdir() if self._tables and self._folder.is_dir() else ():
            if path.name not in kept:
                shutil.rmtree(path)


def _write(file: BinaryIO, table: Any) -> int:
    """Write a table, and return its checksum."""
    descr = np.lib.format.dtype_to_descr(np.dtype(table.dtype))
    header = {"descr": descr, "fortran_order": False, "shape": tuple(table.shape)}
    np.lib.format.write_array_header_1_0(file, header)
    crc = 0
    for shard, ids in _cut(table):
        rows = np.ascontiguousarray(shard.read_rows(ids))
        crc = zlib.crc32(rows.data, crc)
        file.write(rows.data)
    return crc


def _read(file: BinaryIO, table: Any) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yield the rows of a file: the shard that has them, their numbers, and the rows."""
    np.lib.format.read_magic(file)
    shape, _, _ = np.lib.format.read_array_header_1_0(file)
    if shape != tuple(table.shape):
        raise ShapeError(f"its shape is {list(shape)}, and the table has {list(table.shape)}")
    for shard, ids in _cut(table):
        own = (len(ids), *table.shape[1:])
        rows = np.fromfile(file, np.dtype(table.dtype), math.prod(own))
        yield shard, ids, rows.reshape(own)


def _cut(table: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield the shards of a table with the numbers of some of their rows, in order."""
    for shard in getattr(table, "variables", [table]):
        row_bytes = math.prod(shard.shape[1:]) * np.dtype(shard.dtype).itemsize
        step = max(1, _PART_BYTES // max(1, row_bytes))
        for start in range(0, int(shard.shape[0]), step):
            yield shard, np.arange(start, min(start + step, int(shard.shape[0])))
