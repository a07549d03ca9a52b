"""A dataset of global batches from arrays in memory."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._integers import check_not_masked
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, as_integer, show
from jaxdist.data._reading.ahead import INFINITE_CARDINALITY, HasRowsAhead, RowsAhead
from jaxdist.data._reading.elements import check_not_traced, copy_rows
from jaxdist.errors import ArgumentTypeError, ShapeError


class BatchesState(TypedDict):
    """The position of a pass over `batches`; plain values that any checkpoint can hold."""

    # The position is a number of examples, not of batches. So a pass can be resumed with another
    # batch size, and no example is lost or returned twice.
    epoch: int  # counted from 0
    index: int  # examples of that epoch that were returned already
    num_examples: int  # with `shuffle` and `seed`, to reject a state of other data
    shuffle: bool
    seed: int


@called("data.batches")
def batches(
    arrays: PyTree,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    repeat: int | None = 1,
    first_epoch: int = 0,
) -> "Batches":
    """Return a dataset of batches from arrays in memory, for `experimental_distribute_dataset`.

    Shapes:
        In: every leaf `[N, ...]`, the same `N`.
        Out: every leaf `[batch_size, ...]`; the last batch of an epoch has the remaining
        `N % batch_size` examples, unless `drop_remainder`.

    Cost:
        One copy of each batch; with `shuffle`, 8 bytes per example to hold the order.

    Guarantees:
        An epoch returns each example exactly once (with `drop_remainder`: at most once).
        The order depends on `seed` and the epoch only. It does not depend on the number of
        replicas or on the batch size.
        Each later pass (`for` over the same object) has the order of the next epoch.
        A batch is a copy: changing the arrays later does not change it.

    Args:
        arrays: Pytree of arrays; NumPy, JAX, or anything that NumPy can read.
        batch_size: Number of examples in one global batch.
        shuffle: Whether each epoch has its own order.
        seed: Seed of the orders.
        drop_remainder: Whether to drop the incomplete last batch of an epoch.
        repeat: Number of epochs in one pass; `None` for no end.
        first_epoch: Number of the first epoch of the first pass; it determines the order.

    Raises:
        ShapeError: A leaf is a scalar, leaves have different numbers of examples, or there are
            too few examples for one batch.
        ArgumentError: `batch_size` or `repeat` is below 1, or `seed` or `first_epoch` below 0.
        ArgumentTypeError: One of these is not an int, or a flag is not a bool.

    Example:
        >>> data = batches({"x": np.arange(6)}, 4)
        >>> [b["x"].tolist() for b in data]
        [[0, 1, 2, 3], [4, 5]]

    Source:
        `Dataset.from_tensor_slices(...).shuffle(N).batch(...).repeat(...)` of `tf.data`; all
        examples of a batch are from one epoch.
    """
    as_integer("batch_size", batch_size, least=1)
    as_integer("seed", seed, least=0)
    if repeat is not None:
        as_integer("repeat", repeat, least=1)
    as_integer("first_epoch", first_epoch, least=0)
    call_as("batches", as_flag, "shuffle", shuffle)
    call_as("batches", as_flag, "drop_remainder", drop_remainder)
    num_examples = check_arrays(arrays)
    if num_examples < (batch_size if drop_remainder else 1):
        raise _too_few_error(num_examples, batch_size)
    # Convert once here, not in each batch: JAX arrays on a device are copied to the host.
    host = jax.tree.map(np.asarray, arrays)
    return Batches(
        host, num_examples, batch_size, shuffle, seed, drop_remainder, repeat, first_epoch
    )


@dataclasses.dataclass(repr=False, eq=False)
class Batches:
    """The dataset that `batches` returns; it can be iterated over any number of times."""

    arrays: PyTree
    num_examples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_remainder: bool
    repeat: int | None
    first_epoch: int = 0
    next_epoch: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.next_epoch = self.first_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one epoch.

        Example:
            >>> batches(np.zeros(10), 4).batches_per_epoch
            3
        """
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    @property
    def cardinality(self) -> int:
        """Number of batches in one pass, or `INFINITE_CARDINALITY`."""
        if self.repeat is None:
            return INFINITE_CARDINALITY
        return self.batches_per_epoch * self.repeat

    def cardinality_of_multiples(self, divisor: int) -> int:
        """Return the number of batches in one pass whose size is a multiple of `divisor`."""
        whole, rest = divmod(self.num_examples, self.batch_size)
        count = whole * (self.batch_size % divisor == 0)
        count += not self.drop_remainder and rest > 0 and rest % divisor == 0
        if self.repeat is None:
            return INFINITE_CARDINALITY if count else 0
        return count * self.repeat

    def restarted(self) -> "Batches":
        """Return a dataset of the same arrays that starts again at `first_epoch`."""
        return dataclasses.replace(self)

    def order(self, epoch: int) -> np.ndarray | None:
        """Return the order of the examples in `epoch`; None means the order of the arrays."""
        if not self.shuffle:
            return None
        return draw_order(self.num_examples, self.seed, epoch)

    def __iter__(self) -> "BatchesIterator":
        return BatchesIterator(self)

    def __len__(self) -> int:
        if self.repeat is None:
            raise ArgumentTypeError(
                "len() was called on data.batches(..., repeat=None).\n\n"
                "With repeat=None a dataset has no end, so it has no length.\n\n"
                "Use len(data.batches(..., repeat=1)), the number of batches of one epoch."
            )
        return self.cardinality

    def __bool__(self) -> bool:
        # Without this, Python calls __len__, which raises for a dataset without end.
        return True

    def __repr__(self) -> str:
        return (
            f"batches({self.num_examples} examples, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, seed={self.seed}, drop_remainder={self.drop_remainder}, "
            f"repeat={self.repeat})"
        )


def draw_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random order of the numbers below `count`, which is always the same for an epoch."""
    # NumPy guarantees that these raw bits never change. It gives no such guarantee for
    # `Generator.permutation`, so an upgrade could break a resumed pass.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))
    return np.argsort(bits.random_raw(count), kind="stable")


class BatchesIterator(Iterator[PyTree], HasRowsAhead):
    """One pass over `Batches`, whose position can be saved and restored."""

    def __init__(self, source: Batches) -> None:
        self._source = source
        self._epoch = source.next_epoch
        self._index = 0
        self._order = source.order(self._epoch)
        self._claim_pass()

    def _claim_pass(self) -> None:
        """Set the epoch where this pass ends; the next pass over the same object starts there."""
        # Rounded to a multiple of `repeat`, since a restored pass may start in the middle.
        span = self._source.repeat or 1
        end = (self._epoch // span + 1) * span
        self._source.next_epoch = end
        self._end_epoch = None if self._source.repeat is None else end

    def __next__(self) -> PyTree:
        total, take = self.advance()
        return take([slice(0, total)])

    def advance(self) -> tuple[int, Callable[[Sequence[slice]], PyTree]]:
        """Advance by one batch; return its number of rows, and a function that copies some rows.

        Example:
            >>> total, take = iter(batches(np.arange(6), 4)).advance()
            >>> total, take([slice(1, 2), slice(3, 4)]).tolist()
            (4, [1, 3])
        """
        source = self._source
        # Advance to the next epoch at the start of a call, not at the end of the previous call:
        # `order` sorts all examples, and the pass may have ended.
        size = min(source.batch_size, source.num_examples - self._index)
        if size == 0 or (source.drop_remainder and size < source.batch_size):
            if self._epoch + 1 == self._end_epoch:
                raise StopIteration
            self._epoch, self._index = self._epoch + 1, 0
            self._order = source.order(self._epoch)
            size = min(source.batch_size, source.num_examples)
        start, order = self._index, self._order
        self._index += size

        def take(parts: Sequence[slice]) -> PyTree:
            rows = _join_slices(parts, start)
            if order is not None:
                rows = order[rows]
            return jax.tree.map(lambda leaf: copy_rows(leaf, rows), source.arrays)

        return size, take

    def rows_ahead(self) -> RowsAhead:
        """Return the row counts of the next batches.

        Example:
            >>> ahead = iter(batches(np.arange(6), 4)).rows_ahead()
            >>> ahead.count, ahead.rows(1), ahead.first_short
            (2, 2, 1)
        """
        source, size = self._source, self._source.batch_size
        left, per_epoch = source.num_examples - self._index, source.batches_per_epoch
        now = left // size if source.drop_remainder else -(-left // size)
        epochs = None if self._end_epoch is None else self._end_epoch - self._epoch - 1

        # The current epoch may be shorter than the others: a resumed pass starts within it.
        def rows(number: int) -> int:
            examples = left
            if number >= now:
                examples, number = source.num_examples, (number - now) % per_epoch
            return min(size, examples - number * size)

        short = None
        if not source.drop_remainder and left % size:
            short = now - 1
        elif not source.drop_remainder and source.num_examples % size and epochs != 0:
            short = now + per_epoch - 1
        return RowsAhead(None if epochs is None else now + epochs * per_epoch, rows, short)

    def get_state(self) -> BatchesState:
        """Return the position of this pass.

        Example:
            >>> it = iter(batches(np.arange(6), 4))
            >>> _ = next(it)
            >>> it.get_state()["index"]
            4
        """
        source = self._source
        return {
            "epoch": self._epoch,
            "index": self._index,
            "num_examples": source.num_examples,
            "shuffle": source.shuffle,
            "seed": source.seed,
        }

    def set_state(self, state: BatchesState) -> None:
        """Continue after the last example that was returned when `state` was taken.

        The batch size may differ: no example is lost and none is returned twice.

        Raises:
            ArgumentError: `state` was taken from other data or another order, or is not a state.
        """
        own_state = self.get_state()
        _check_state(own_state, state)
        # A checkpoint may have turned ints into NumPy scalars, which JSON does not hold.
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._order = self._source.order(self._epoch)
        self._claim_pass()


def _join_slices(parts: Sequence[slice], start: int) -> slice | np.ndarray:
    """Return the rows of some slices, counted from `start`, as one slice if they are adjacent."""
    if not parts:
        return slice(start, start)
    if all(a.stop == b.start for a, b in itertools.pairwise(parts)):
        return slice(start + parts[0].start, start + parts[-1].stop)
    return np.concatenate([np.arange(start + p.start, start + p.stop) for p in parts])


def check_same_order(
    own: Mapping[str, Any], state: Any, dataset: str, count: str, rule: str
) -> None:
    """Check that a state is built like `own`, and is of the same data in the same order."""
    is_state = isinstance(state, dict) and set(state) == set(own)
    parts = [name for name, value in own.items() if isinstance(value, dict)]
    if not is_state or not all(isinstance(state[name], dict) for name in parts):
        raise refuse(
            f"state={show(state)}.",
            f"A state of {dataset} is a dict with {sorted(own)}.",
            "Pass what get_state() returned.",
        )
    differing = [name for name in (count, "shuffle", "seed") if state[name] != own[name]]
    if differing:
        found, here = (
            ", ".join(f"{name}={one[name]!r}" for name in differing) for one in (state, own)
        )
        raise refuse(
            f"a state that was taken with {found}, and this dataset has {here}.",
            rule,
            "Build the dataset as it was when the state was saved, or start from the beginning.",
        )


@called("set_state of an iterator of data.batches")
def _check_state(own_state: BatchesState, state: Any) -> None:
    rule = "A state belongs to one dataset and to one order of its examples."
    check_same_order(own_state, state, "data.batches", "num_examples", rule)
    epoch, index = state["epoch"], state["index"]
    most = own_state["num_examples"]
    is_sound = isinstance(epoch, (int, np.integer)) and isinstance(index, (int, np.integer))
    if not is_sound or epoch < 0 or not 0 <= index <= most:
        raise refuse(
            f"a damaged state: epoch={epoch!r}, index={index!r}, for {most} examples.",
            f"epoch is an integer from 0 up, and index one from 0 to {most}.",
            "Start from the beginning of an epoch: index=0.",
        )


def check_arrays(arrays: PyTree, name: str = "arrays") -> int:
    """Check that all leaves have the same number of examples, and return it."""
    caller = name_call()
    check_not_traced(f"{caller} was given", name, arrays)
    named = [(name + keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(arrays)]
    for place, leaf in named:
        check_not_masked(place, leaf)
        # `np.asarray` would read all of an array on disk, so prefer its own dtype.
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise refuse_type(
                f"{place}={show(leaf)}, an array of {dtype}.",
                "Examples are rows of NumPy arrays, and NumPy has no random keys.",
                "Pass jax.random.key_data(keys), and make keys of it in the step: "
                "jax.random.wrap_key_data(data).",
            )
        if getattr(dtype, "hasobject", False):
            raise refuse_type(
                f"{place}={show(leaf)}, an array of objects.",
                "Examples are rows of numbers, and devices hold no Python objects.",
                "Pass an array of numbers, of bools or of text: np.asarray(rows, 'float32').",
            )
    shapes = {place: np.shape(leaf) for place, leaf in named}
    scalars = [place for place, shape in shapes.items() if not shape]
    counts = {shape[0] for shape in shapes.values() if shape}
    if scalars or len(counts) != 1:
        raise _no_common_count_error(name, shapes, scalars)
    return int(counts.pop())


def _no_common_count_error(
    name: str, shapes: dict[str, tuple[int, ...]], scalars: list[str]
) -> ShapeError:
    if not shapes:
        return refuse(
            f"{name} without an array.",
            f"{name} is a pytree of arrays with rows of examples.",
            "Pass at least one array.",
            kind=ShapeError,
        )
    found = "\n".join(f"  {name} has shape {list(shape)}" for name, shape in shapes.items())
    rest = (
        f"Leave {', '.join(scalars)} out, and pass it to the step on its own."
        if scalars
        else f"Cut all of them to {min(s[0] for s in shapes.values())} rows, or add the examples "
        "that the shorter ones miss."
    )
    return refuse(
        f"{name} that differ in the number of examples on dim 0:\n{found}",
        "Row i of every array is example i, so all have the same dim 0.",
        rest,
        kind=ShapeError,
    )


def _too_few_error(num_examples: int, batch_size: int) -> ShapeError:
    if num_examples == 0:
        return refuse(
            "arrays with 0 examples on dim 0.",
            "A dataset has one example or more.",
            "Pass arrays with rows.",
            kind=ShapeError,
        )
    return refuse(
        f"{num_examples} examples, batch_size={batch_size} and drop_remainder=True.",
        "With drop_remainder=True a dataset needs at least one full batch.",
        f"Use a batch size of at most {num_examples}, or drop_remainder=False.",
        kind=ShapeError,
    )
