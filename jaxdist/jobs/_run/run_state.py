"""The state of a run that its checkpoints save; tables are in files next to them."""

import dataclasses
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxdist._buckets import BucketPath, Place
from jaxdist._checkpoints import Restored, put_into, to_plain
from jaxdist._strategies import Strategy
from jaxdist._values import IndexedSlices, Scatter, is_sharded
from jaxdist.data import DistributedIterator
from jaxdist.errors import CheckpointError, ConfigError, ShapeError
from jaxdist.jobs._config.changes import Changed, find_changed_entries
from jaxdist.jobs._run.metrics import History
from jaxdist.jobs._tables import find_tables

# A part of a table in memory. `jaxdist._checkpoints` would need memory for the whole table.
_PART_BYTES = 2**25


class TableFiles:
    """The tables of a job on parameter servers, with one `.npy` file for each table and step.

    The notes of a checkpoint have the checksums of its tables. A file whose step has no complete
    checkpoint is never read.

    Args:
        directory: The directory of the checkpoints.
        tables: The variables by name.

    Raises:
        ConfigError: The directory is in a bucket, and there are tables.
    """

    def __init__(self, directory: Place, tables: Mapping[str, Any]) -> None:
        if isinstance(directory, BucketPath):
            if tables:
                raise ConfigError(
                    f"checkpoint.directory is {str(directory)!r}, and the tables "
                    f"{', '.join(map(repr, tables))} are on parameter servers.\n\n"
                    "Tables on servers are saved in files of a folder, row by row.\n\n"
                    "Set checkpoint.directory to a folder, such as a mounted bucket."
                )
            directory = Path()
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
                problem = f"its checksum is {crc} instead of {wanted}" if crc != wanted else ""
            except (OSError, ValueError) as error:
                problem = str(error)
            if problem:
                raise CheckpointError(
                    f"The table {name!r} of step {step} cannot be read from {path}: {problem}.\n\n"
                    "A checkpoint with a table is complete only with the file of its table.\n\n"
                    f"Delete checkpoint {step} to resume from the one before, or use another "
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


@dataclasses.dataclass
class RunState:
    """A model, its optimizer, the position in the data, and the history.

    Attributes:
        model: A Flax NNX module.
        optimizer: Its optimizer.
        data: The iterator of batches.
        history: Losses and evaluations.
    """

    model: Any
    optimizer: Any
    data: DistributedIterator
    history: History = dataclasses.field(default_factory=History)

    @property
    def _tables(self) -> dict[str, Any]:
        return {name: table.variable for name, table in find_tables(self.model).items()}

    @property
    def remote_tables(self) -> dict[str, Any]:
        """The tables that are on servers, which `TableFiles` saves."""
        return {n: x for n, x in self._tables.items() if hasattr(x, "read_rows")}

    @property
    def modules(self) -> dict[str, Any]:
        """The objects that a checkpoint saves."""
        tables = {n: x for n, x in self._tables.items() if not hasattr(x, "read_rows")}
        found = {"model": self.model, "optimizer": self.optimizer}
        return {**found, "tables": tables} if tables else found

    def history_after(self, step: int, pending: Sequence[Any]) -> History:
        """Return the history up to a step; `pending` are results that it does not have yet."""
        return self.history.after(step, pending)

    def make_restore_target(self, strategy: Strategy) -> dict[str, Any]:
        """Return what to restore: arrays on the strategy's mesh as placed, others replicated."""

        def choose_layout(leaf: Any) -> Any:
            if is_sharded(leaf) or getattr(leaf.sharding, "mesh", None) == strategy.mesh:
                return leaf
            # For instance, a counter that NNX made on the default device.
            whole = strategy.replicated_sharding
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)

        return jax.tree.map(choose_layout, to_plain(self.modules), is_leaf=is_sharded)

    def load(self, restored: Restored) -> None:
        """Load a restored checkpoint into the model, the optimizer, the data and the history."""
        put_into(self.modules, restored.state)
        self.data.set_state(restored.notes["position"])
        self.history = History(**restored.notes["history"])

    def note_changes(
        self, restored: Restored, changes: Sequence[Changed], config: Any
    ) -> Iterator[str]:
        """Add changed entries to the history, and yield a line about each.

        `training.steps` may change freely. It counts as a change only if the learning rate follows
        a schedule over the steps.
        """
        saved = restored.notes.get("config")
        if saved is None:
            yield "the checkpoint does not record the values that it was trained with"
            return
        steps = [c for c in find_changed_entries(saved, config) if c.name == "training.steps"]
        # A cosine schedule depends on the total number of steps; a constant one does not.
        curve = steps if config.optimizer.schedule != "constant" else []
        for change in (*changes, *curve):
            entry = {"after_step": restored.step, "entry": change.name}
            self.history.changes.append({**entry, "before": change.before, "after": change.after})
            what = (
                " (the learning rate follows a curve over all of them)" if change in curve else ""
            )
            yield (f"{change.name} is {change.after} from here on, and was {change.before}{what}")
