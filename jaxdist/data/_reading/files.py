"""A dataset of global batches from files; each process can read its own files."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, as_integer, check_callable, show
from jaxdist._values import PerReplica
from jaxdist.data._reading.cardinality import UNKNOWN_CARDINALITY
from jaxdist.data._reading.files_iterator import FilesIterator

Path = str | os.PathLike[str]


@called("data.from_files")
def from_files(
    paths: Iterable[Path],
    read: Callable[[Any], Iterable[PyTree]],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
) -> "Files":
    """Return a dataset of batches from files, for `experimental_distribute_dataset`.

    With a strategy of several processes, each process reads its own files if there are at least as
    many files as processes (`AutoShardPolicy.FILE`).

    Shapes:
        In: every leaf of an example `[...]`.
        Out: every leaf `[batch_size, ...]`; the last batch of an epoch has the remaining examples.

    Cost:
        One file is open at a time. Restoring a position within a file skips the examples before
        it: at no cost if `read` returns a sequence; otherwise they are read.

    Guarantees:
        A pass returns each example exactly once. In one process the order is that of the files,
        and the order within each file. Several processes return the same examples in each epoch.

    Args:
        paths: The files. All processes pass the same files, in the same order.
        read: A function of a path that returns the examples of the file, each a pytree of arrays
            or numbers: as a list, an array with a row for each example, a generator, or any
            iterable.
        batch_size: Number of examples in one global batch.
        shuffle: Whether each epoch has its own order of files; the examples of a file keep their
            order.
        seed: Seed of the orders.

    Raises:
        ArgumentError: `paths` is empty or has a path twice; `batch_size` is below 1 or `seed`
            below 0. While iterating: `read` has failed, or has not returned examples.
        ArgumentTypeError: An argument has the wrong type.
        ShapeError: While iterating, the examples of a batch have different shapes.

    Example:
        >>> lines = {"a": [1, 2, 3], "b": [4, 5]}
        >>> [x.tolist() for x in jaxdist.data.from_files(["a", "b"], lines.get, 2)]
        [[1, 2], [3, 4], [5]]

    Source:
        `Dataset.from_tensor_slices(paths).flat_map(read).batch(batch_size)` of `tf.data`.
    """
    # A set has no order, and all processes need the same order.
    no_list = (str, bytes, os.PathLike, set, frozenset, Mapping, PerReplica)
    if isinstance(paths, no_list) or not _can_iterate(paths):
        raise refuse_type(
            f"paths={show(paths)}.",
            "paths is a list of paths.",
            "Pass for instance sorted(pathlib.Path('data').glob('*.npz')).",
        )
    listed = tuple(paths)
    for path in listed:
        if not isinstance(path, (str, os.PathLike)):
            raise refuse_type(
                f"{show(path)} among its paths.",
                "Each path is a text or a pathlib.Path.",
                "Pass the paths of the files.",
            )
    if not listed:
        raise refuse(
            "0 paths.",
            "A dataset has one file or more.",
            "Check the folder and the pattern that the paths come from.",
        )
    twice = next((p for p, count in Counter(map(str, listed)).items() if count > 1), None)
    if twice is not None:
        raise refuse(
            f"the path {twice!r} twice.", "An epoch has each file once.", "Pass each path once."
        )
    check_callable(read, "read")
    as_integer("batch_size", batch_size, least=1)
    as_integer("seed", seed, least=0)
    call_as("from_files", as_flag, "shuffle", shuffle)
    return Files(listed, read, batch_size, shuffle, seed)


def _can_iterate(paths: Any) -> bool:
    # An array without dims has an `__iter__`, which raises.
    return isinstance(paths, Iterable) and getattr(paths, "ndim", 1) > 0


@dataclasses.dataclass(repr=False, eq=False)
class Files:
    """The dataset that `from_files` returns; it can be iterated over any number of times."""

    paths: Sequence[Path]
    read: Callable[[Any], Iterable[PyTree]]
    batch_size: int
    shuffle: bool
    seed: int
    next_epoch: int = dataclasses.field(default=0, init=False)

    @property
    def cardinality(self) -> int:
        """`UNKNOWN_CARDINALITY`: the files must be read to count their examples."""
        return UNKNOWN_CARDINALITY

    def restarted(self) -> "Files":
        """Return a dataset of the same files that starts again at epoch 0."""
        return dataclasses.replace(self)

    def order(self, epoch: int) -> Sequence[int]:
        """Return the indices of the files in the order of `epoch`."""
        if not self.shuffle:
            return range(len(self.paths))
        # As in `Batches.order`: NumPy guarantees that these bits never change.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
        return [int(i) for i in np.argsort(bits.random_raw(len(self.paths)), kind="stable")]

    def claim_epoch(self) -> int:
        """Return the epoch of the next pass, and advance to the one after it."""
        epoch, self.next_epoch = self.next_epoch, self.next_epoch + 1
        return epoch

    def __iter__(self) -> FilesIterator:
        return FilesIterator(self, self.batch_size)

    def __repr__(self) -> str:
        return (
            f"from_files({len(self.paths)} files, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, seed={self.seed})"
        )
