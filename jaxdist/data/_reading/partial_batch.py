"""What becomes of a batch that the replicas cannot share evenly."""

import enum


class PartialBatch(enum.Enum):
    """What becomes of a batch that the replicas cannot share evenly.

    Most often that is the last one of an epoch. `InputOptions(partial_batch=...)` takes it.

    Shapes:
        For a global batch of `B` rows and `R` replicas.
        `UNEVEN`: local `[ceil(B/R), ...]` on the first replicas, then one with the rest, then
        `[0, ...]`; the leaves are `PerReplica` that hold the values one by one.
        `PAD`: every batch, the full ones too, is `(batch, mask)`. Leaves are global
        `[P, ...]`, where `P` is the size of the first batch rounded up to a multiple of `R`; the
        mask is a boolean `[P]`, true for the rows that are real. The other rows are zero.

    Cost:
        `UNEVEN`: `R` copies from the host for each leaf in place of one, and the step is
        compiled for each distinct local shape. `PAD`: nothing more, and one compilation.

    Guarantees:
        `UNEVEN` and `PAD` give each example exactly once per pass, `DROP` at most once, and
        `ERROR` exactly once or raises `ShapeError`. So they do after resuming from a state.

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
        `UNEVEN` is what `tf.distribute` does (its `AutoShardPolicy.AUTO`), but for an incomplete
        last group of static shapes, which it drops.
    """

    UNEVEN = "UNEVEN"  # replicas get different numbers of rows
    PAD = "PAD"  # one shape for all batches, and a mask of the rows that are real
    DROP = "DROP"  # it is left out, which is logged once
    ERROR = "ERROR"  # ShapeError, with the sizes that would do


def split_rows(rows: int, num_replicas: int) -> list[slice]:
    """The rows of each replica: `ceil(rows / num_replicas)` each, until none are left.

    Example:
        >>> from jaxdist.data._reading.partial_batch import shares
        >>> [s.stop - s.start for s in shares(10, 4)], [s.stop - s.start for s in shares(9, 4)]
        ([3, 3, 3, 1], [3, 3, 3, 0])
    """
    size = -(-rows // num_replicas)
    ends = [min(i * size, rows) for i in range(num_replicas + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(num_replicas)]


def round_up(rows: int, multiple: int) -> int:
    """The next multiple of `multiple`, or `rows` itself where it is one."""
    return rows + -rows % multiple
