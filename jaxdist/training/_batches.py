"""Batches of in-memory arrays for evaluation; `jaxdist.data.batches` is for training."""

from collections.abc import Iterator, Mapping

import numpy as np

from jaxdist.errors import ShapeError

Arrays = Mapping[str, np.ndarray]


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

    Raises:
        ShapeError: Arrays differ in rows.

    Example:
        >>> [b["weight"].tolist() for b in padded_batches({"x": np.arange(3)}, 2)]
        [[1.0, 1.0], [1.0, 0.0]]
    """
    rows = _num_rows(arrays)
    for start in range(0, rows, batch_size):
        taken = min(batch_size, rows - start)
        batch = {name: _filled(a[start : start + taken], batch_size) for name, a in arrays.items()}
        batch["weight"] = (np.arange(batch_size) < taken).astype(np.float32)
        yield batch


def _num_rows(arrays: Arrays) -> int:
    """The rows that all arrays have, refused where they differ."""
    rows = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(rows.values())) != 1:
        raise ShapeError(
            f"padded_batches needs arrays with the same number of rows, and was given {rows}.\n\n"
            "Give one row of each array to each example."
        )
    return next(iter(rows.values()))


def _filled(rows: np.ndarray, size: int) -> np.ndarray:
    return np.pad(rows, [(0, size - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1)])
