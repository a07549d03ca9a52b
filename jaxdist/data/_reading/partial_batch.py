"""Batches that cannot be split evenly over the replicas: the policies, and the log of drops."""

import enum
import logging
from typing import Any

import jax

from jaxdist._called import name_call
from jaxdist._typing import PyTree
from jaxdist._values import first_value, is_per_replica
from jaxdist.errors import ShapeError


class PartialBatch(enum.Enum):
    """Choice of what to do with a batch that cannot be split evenly over the replicas.

    Most often this is the last batch of an epoch. Pass it as `InputOptions(partial_batch=...)`.

    Shapes:
        For a global batch of `B` rows and `R` replicas.
        `UNEVEN`: local `[ceil(B/R), ...]` on the first replicas, then one with the rest, then
        `[0, ...]`; the leaves are `PerReplica` with one array for each replica. With
        `InputOptions(balance_rows=True)` local `[ceil(B/R), ...]` or `[floor(B/R), ...]`.
        `PAD`: every batch, full or not, is `(batch, mask)`. Leaves are global `[P, ...]`, where
        `P` is the size of the first batch rounded up to a multiple of `R`; the mask is a boolean
        `[P]`, true for real rows. The other rows are zero. They are at the end of the batch, or
        with `balance_rows` at the end of the rows of each replica.

    Cost:
        `UNEVEN`: `R` copies from the host for each leaf instead of one, and the step is compiled
        for each distinct local shape. `PAD`: no extra copies, and one compilation.

    Guarantees:
        `UNEVEN` and `PAD` return each example exactly once per pass. `DROP` returns it at most
        once. `ERROR` returns it exactly once or raises `ShapeError`. The same holds after a pass
        is resumed from a state.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
        >>> def shared_out(policy):
        ...     options = InputOptions(partial_batch=policy)
        ...     return next(iter(strategy.experimental_distribute_dataset([np.arange(5)], options)))
        >>> shared_out(PartialBatch.UNEVEN)
        PerReplica([0, 1], [2, 3], [4], [])
        >>> batch, mask = shared_out(PartialBatch.PAD)
        >>> batch
        PerReplica([0, 1], [2, 3], [4, 0], [0, 0])
        >>> mask.values[2].tolist()
        [True, False]

    Source:
        `tf.distribute` does the same as `UNEVEN` (its `AutoShardPolicy.AUTO`), except that it
        drops an incomplete last group of static shapes.
    """

    UNEVEN = "UNEVEN"  # replicas get different numbers of rows
    PAD = "PAD"  # one shape for all batches, and a mask of the real rows
    DROP = "DROP"  # the batch is dropped, which is logged once
    ERROR = "ERROR"  # ShapeError, which names the possible sizes


def split_rows(rows: int, num_replicas: int, *, balanced: bool = False) -> list[slice]:
    """Return the rows of each replica: `ceil(rows / num_replicas)` each, until none are left.

    TensorFlow splits a batch in this way (see `PartialBatch`). With `balanced`, two replicas
    differ by one row at most, like the parts of `np.array_split`.

    Example:
        >>> from jaxdist.data._reading.partial_batch import split_rows
        >>> [s.stop - s.start for s in split_rows(10, 4)]
        [3, 3, 3, 1]
        >>> [s.stop - s.start for s in split_rows(9, 4)]
        [3, 3, 3, 0]
        >>> [s.stop - s.start for s in split_rows(9, 4, balanced=True)]
        [3, 2, 2, 2]
    """
    size, longer = divmod(rows, num_replicas)
    if balanced:
        ends = [i * size + min(i, longer) for i in range(num_replicas + 1)]
    else:
        size += longer > 0
        ends = [min(i * size, rows) for i in range(num_replicas + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(num_replicas)]


def round_up(rows: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `rows`."""
    return rows + -rows % multiple


SPLIT_CALLER = "experimental_distribute_dataset"
GROUP_CALLER = "distribute_datasets_from_function"

_LOG = logging.getLogger("jaxdist")


class Dropped:
    """A marker that replaces a dropped batch."""

    __slots__ = ("is_last",)

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last  # whether no later batch of the pass can be full


class Drops:
    """A log of the dropped batches of one dataset, over all passes."""

    def __init__(self, num_replicas: int) -> None:
        self._caller = name_call()
        self._num_replicas = num_replicas
        self._was_logged = False

    def drop(self, examples: int, index: int, *, is_last: bool = False) -> Dropped:
        """Return a `Dropped`, and log the first one."""
        # Every epoch drops the same batches, so one message for a dataset is enough.
        if not self._was_logged:
            self._was_logged = True
            _LOG.warning(
                "%s: batch %d of the dataset has %d example(s), which %d replicas cannot share "
                "evenly. partial_batch=DROP leaves it out; later ones are left out without a "
                "message.",
                self._caller,
                index,
                examples,
                self._num_replicas,
            )
        return Dropped(is_last=is_last)


# An endless dataset whose batches are all uneven must not be read forever.
MAX_DROPPED_IN_A_ROW = 1000


def nothing_left_error(count: int, *, is_all: bool) -> ShapeError:
    """Return the error for a pass, or `count` batches in a row, all of which were dropped."""
    what = (
        f"the whole dataset: {count} batch(es), none of which the replicas can share evenly"
        if is_all
        else f"{count} batches in a row, since the replicas cannot share them evenly"
    )
    return ShapeError(
        f"partial_batch=DROP left out {what}.\n\n"
        "A batch can be shared evenly when its dim 0 is a multiple of the number of replicas. "
        "Elements of datasets of distribute_datasets_from_function need the same shapes in a step."
        "\n\n"
        "Make batches of such a size, or use partial_batch=UNEVEN or PAD."
    )


def spec_of(batch: PyTree) -> PyTree:
    """Return the shapes and dtypes of replica 0's part of a batch."""

    def leaf_spec(leaf: Any) -> jax.ShapeDtypeStruct:
        local = first_value(leaf)
        return jax.ShapeDtypeStruct(local.shape, local.dtype)

    return jax.tree.map(leaf_spec, batch, is_leaf=is_per_replica)
