"""A dataset of global batches from files; each process can read its own files.

# Note [Position in files]
The position of a pass is the number of examples returned from each file. It does not record which
process read them: when a pass is resumed, the remaining files are divided among the processes that
exist then.
"""

import dataclasses
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
import numpy as np

from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, as_integer, check_callable, show
from jaxdist._values import PerReplica
from jaxdist.data._reading.ahead import UNKNOWN_CARDINALITY
from jaxdist.data._reading.batches import check_same_order, draw_order
from jaxdist.data._reading.elements import as_array
from jaxdist.errors import ArgumentError, JaxdistError, ShapeError

ALL_READ = -1


class FilesState(TypedDict):
    """The position of a pass over `from_files`; plain values that any checkpoint can hold."""

    epoch: int  # counted from 0
    read: dict[str, int]  # for each file that was begun: examples returned, or `ALL_READ`
    num_files: int  # with `shuffle` and `seed`, to reject a state of other data
    shuffle: bool
    seed: int


class FilesIterator(Iterator[PyTree]):
    """One pass over files, whose position can be saved and restored.

    Args:
        source: The dataset.
        batch_size: Number of examples in a batch.
        part: The index of this process, and the number n of processes; each takes every n-th
            file.
    """

    def __init__(self, source: "Files", batch_size: int, part: tuple[int, int] = (0, 1)) -> None:
        self._source = source
        self._batch_size = batch_size
        self._part = part
        self._epoch = source.claim_epoch()
        self._read: dict[str, int] = {}
        self._changed: dict[str, int] = {}
        self._open()

    def _open(self) -> None:
        first, stride = self._part
        order = self._source.order(self._epoch)
        left = [n for n in order if self._read.get(str(n)) != ALL_READ]
        self._examples = self._read_files(left[first::stride])

    def _read_files(self, numbers: Sequence[int]) -> Iterator[PyTree]:
        for number in numbers:
            key, done = str(number), self._read.get(str(number), 0)
            for example in _read_file(self._source, number, done):
                done += 1
                self._note(key, done)
                yield example
            self._note(key, ALL_READ)

    def _note(self, file: str, count: int) -> None:
        self._read[file] = self._changed[file] = count

    def __next__(self) -> PyTree:
        # `islice` raises for numbers above `sys.maxsize`.
        examples = list(itertools.islice(self._examples, min(self._batch_size, sys.maxsize)))
        if not examples:
            raise StopIteration
        return _stack(examples)

    def take_progress(self) -> dict[str, int]:
        """Return the progress in each file that this process has read since the last call."""
        changed = dict(self._changed)
        self._changed.clear()
        return changed

    def add_progress(self, progress: Mapping[str, int]) -> None:
        """Record the progress of other processes in their files."""
        self._read.update(progress)

    def get_state(self) -> FilesState:
        """Return the position of this pass, of all processes whose progress was added."""
        source = self._source
        return {
            "epoch": self._epoch,
            "read": dict(self._read),
            "num_files": len(source.paths),
            "shuffle": source.shuffle,
            "seed": source.seed,
        }

    def set_state(self, state: FilesState) -> None:
        """Continue after the examples that were returned when `state` was taken.

        The batch size and the number of processes may differ.

        Raises:
            ArgumentError: `state` was taken from other files or another order, or is not a state.
        """
        _check_state(self.get_state(), state)
        self._epoch = int(state["epoch"])
        self._source.next_epoch = self._epoch + 1
        self._read = {str(k): int(v) for k, v in state["read"].items()}
        self._changed = {}
        self._open()


def _read_file(source: "Files", number: int, start: int) -> Iterator[PyTree]:
    path = source.paths[number]
    try:
        examples: Any = source.read(path)
        if isinstance(examples, (str, bytes, Mapping)) or examples is None:
            raise _no_examples_error(path, examples)
        # Sequences: skip the examples before `start` without reading them.
        if hasattr(examples, "__getitem__") and hasattr(examples, "__len__"):
            for i in range(start, len(examples)):
                yield examples[i]
            return
        try:
            iterator = iter(examples)
        except TypeError:
            raise _no_examples_error(path, examples) from None
        yield from itertools.islice(iterator, start, None)
    except (JaxdistError, GeneratorExit):
        raise
    except Exception as error:
        raise ArgumentError(
            f"data.from_files cannot read {str(path)!r}: {type(error).__name__}: {error}\n\n"
            "read(path) returns the examples of one file.\n\n"
            "Check that the file exists and is complete, and that read(path) works for it."
        ) from error


def _no_examples_error(path: Any, found: Any) -> ArgumentError:
    return ArgumentError(
        f"data.from_files: read({str(path)!r}) returned {show(found)}.\n\n"
        "read(path) returns the examples of one file: a list, an array with a row for each, a "
        "generator, or any iterable.\n\n"
        "For arrays in a dict, return [{name: a[i] for name, a in arrays.items()} for i in ...]."
    )


def _stack(examples: Sequence[PyTree]) -> PyTree:
    try:
        return jax.tree.map(lambda *leaves: np.stack([as_array(x) for x in leaves]), *examples)
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"data.from_files cannot make a batch of {len(examples)} examples: {error}\n\n"
            "The examples of a batch have the same structure, and arrays of the same shapes.\n\n"
            "Let read(path) give every example the same keys, and pad its arrays to one shape."
        ) from error


@called("set_state of an iterator of data.from_files")
def _check_state(own: FilesState, state: Any) -> None:
    rule = "A state belongs to one list of files and to one order of them."
    check_same_order(own, state, "data.from_files", "num_files", rule)
    read, epoch = state["read"], state["epoch"]
    numbers = {str(n) for n in range(own["num_files"])}
    are_counts = all(isinstance(n, (int, np.integer)) for n in [epoch, *read.values()])
    is_sound = are_counts and set(read) <= numbers
    if not is_sound or epoch < 0 or min(read.values(), default=0) < ALL_READ:
        raise refuse(
            f"a damaged state: epoch={show(epoch)}, read={show(read)}.",
            "epoch is an integer from 0 up, and read has the examples read of files 0 to "
            f"{own['num_files'] - 1}, or {ALL_READ} for all.",
            "Start from the beginning of an epoch: read={}.",
        )


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
                "Each path is a string or a pathlib.Path.",
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
            f"the path {twice!r} twice.", "An epoch reads each file once.", "Pass each path once."
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
        return draw_order(len(self.paths), self.seed, epoch).tolist()

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
