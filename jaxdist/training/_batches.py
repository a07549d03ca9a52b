"""Batches of in-memory arrays: shuffled and resumable for training, padded for evaluation."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jaxdist.errors import ArgumentError, ShapeError

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Position:
    """Where in the data the next batch starts.

    Units:
        `epoch` counts passes from 0; `row` counts rows of the shuffled epoch.
    """

    epoch: int = 0
    row: int = 0


@dataclasses.dataclass(frozen=True)
class ShuffledBatches:
    """Batches of a dataset in memory, in a new order each epoch; can start anywhere.

    Iterating twice gives the same batches twice.

    Guarantees:
        The order of an epoch depends on `seed` and the epoch only, so a run that starts at a
        saved position sees the batches that an uninterrupted one would have seen.
        No row is seen twice in an epoch; the rows that fill no batch (fewer than `batch_size`,
        others each epoch) are left out of it.

    Shapes:
        In: every array `[N, ...]`. Out: every leaf `[batch_size, ...]`.

    Args:
        arrays: Arrays by name, with one row for each example.
        batch_size: Rows of a batch, over all replicas.
        seed: Decides every order.
        num_batches: How many batches to give.
        start: Position of the first one.

    Raises:
        ShapeError: Arrays differ in rows, or have fewer than `batch_size`.
        ArgumentError: `batch_size` is not positive.

    Example:
        >>> data = ShuffledBatches({"x": np.arange(4)}, batch_size=2, seed=0, num_batches=3)
        >>> [sorted(b["x"].tolist()) for b in data][:2] != [[0, 1], [0, 1]]
        True
        >>> data.position_after(3)
        Position(epoch=1, row=2)
    """

    arrays: Arrays
    batch_size: int
    seed: int
    num_batches: int
    start: Position = Position()

    def __post_init__(self) -> None:
        rows = num_rows("ShuffledBatches", self.arrays)
        if self.batch_size < 1:
            raise ArgumentError(
                f"ShuffledBatches(batch_size={self.batch_size}) needs a positive integer.\n\n"
                f"The data has {rows} rows; pass a number from 1 to {rows}."
            )
        if self.batch_size > rows:
            raise ShapeError(
                f"ShuffledBatches cannot fill a batch of {self.batch_size} rows: the data has "
                f"{rows}.\n\nPass batch_size={rows} or less."
            )

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        epoch, order = -1, np.empty(0, np.int64)
        for done in range(self.num_batches):
            here = self.position_after(done)
            if here.epoch != epoch:
                epoch, order = here.epoch, self._order(here.epoch)
            rows = order[here.row : here.row + self.batch_size]
            yield {name: array[rows] for name, array in self.arrays.items()}

    def position_after(self, num_batches: int) -> Position:
        """The position of the next batch once `num_batches` have been given."""
        rows = num_rows("ShuffledBatches", self.arrays)
        # An epoch that was entered with another batch size is finished from where it stands.
        first = max(0, (rows - self.start.row) // self.batch_size)
        if num_batches < first or (num_batches == first == 0 and self.start.row == 0):
            return Position(self.start.epoch, self.start.row + num_batches * self.batch_size)
        epochs, batches = divmod(num_batches - first, rows // self.batch_size)
        return Position(self.start.epoch + 1 + epochs, batches * self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        rows = num_rows("ShuffledBatches", self.arrays)
        return np.random.default_rng((self.seed, epoch)).permutation(rows)


def padded_batches(arrays: Arrays, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Every row once, in order; the last batch is filled up, and each row has a `weight`.

    Shapes:
        In: every array `[N, ...]`.
        Out: every leaf `[batch_size, ...]`, and `weight` float32 `[batch_size]`: 1 for a row of
        the data, 0 for padding.

    Args:
        arrays: Arrays by name.
        batch_size: Rows of a batch, over all replicas.

    Returns:
        An iterator of batches, all of one shape, so that they are compiled for once.

    Example:
        >>> [b["weight"].tolist() for b in padded_batches({"x": np.arange(3)}, 2)]
        [[1.0, 1.0], [1.0, 0.0]]
    """
    rows = num_rows("padded_batches", arrays)
    for start in range(0, rows, batch_size):
        taken = min(batch_size, rows - start)
        batch = {name: _filled(a[start : start + taken], batch_size) for name, a in arrays.items()}
        batch["weight"] = (np.arange(batch_size) < taken).astype(np.float32)
        yield batch


def num_rows(caller: str, arrays: Arrays) -> int:
    """The rows that all arrays have, refused where they differ."""
    rows = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(rows.values())) != 1:
        raise ShapeError(
            f"{caller} needs arrays with the same number of rows, and was given {rows}.\n\n"
            "Give one row of each array to each example."
        )
    return next(iter(rows.values()))


def _filled(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, [(0, size - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1)])
