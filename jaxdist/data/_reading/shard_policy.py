"""`AutoShardPolicy`: which part of a dataset each process reads."""

import enum
from typing import Any

from jaxdist._called import called, refuse
from jaxdist.data._reading.partial_batch import SPLIT_CALLER


class AutoShardPolicy(enum.IntEnum):
    """Choice of the part of a dataset that each process reads in `experimental_distribute_dataset`.

    `InputOptions(auto_shard_policy=...)` takes it. A strategy of one process reads everything,
    whatever the policy.

    Cost:
        `FILE`: each process reads its own files. `DATA`: each process reads its own rows of arrays
        in memory and of Grain's map datasets; from any other dataset it reads everything, and keeps
        its own rows. `OFF`: each process reads everything.

    Guarantees:
        With `AUTO`, `FILE` and `DATA`, exactly one process has each example, once per epoch. With
        `DATA`, the batches and their order are the same as with one process.

    Example:
        >>> AutoShardPolicy.DATA, int(AutoShardPolicy.OFF)
        (<AutoShardPolicy.DATA: 2>, -1)

    Source:
        `tf.data.experimental.AutoShardPolicy`. There, `DATA` gives a process every n-th batch.
    """

    OFF = -1  # each process has all examples, in its own batches
    AUTO = 0  # FILE for `from_files` with enough files, else DATA
    FILE = 1  # each process reads its share of the files
    DATA = 2  # each process takes its own rows of each global batch
    HINT = 3  # tf.data replaces `shard(SHARD_HINT, ...)`; an error here

    def __repr__(self) -> str:
        return f"<AutoShardPolicy.{self.name}: {self.value}>"

    def __str__(self) -> str:
        return f"AutoShardPolicy.{self.name}"


def read_own_policy(dataset: Any) -> AutoShardPolicy:
    """Return the policy in the options of a tf.data dataset; AUTO for other datasets."""
    if not hasattr(dataset, "as_numpy_iterator"):
        return AutoShardPolicy.AUTO
    distribute = getattr(dataset.options(), "experimental_distribute", None)
    return AutoShardPolicy(int(getattr(distribute, "auto_shard_policy", 0)))


@called(SPLIT_CALLER)
def choose_policy(
    given: AutoShardPolicy | None, dataset: Any, num_files: int | None, rows: tuple[int, ...] | None
) -> AutoShardPolicy:
    """Return the policy to use: OFF, FILE or DATA.

    Args:
        given: The policy in the options; None if they have no policy.
        dataset: The user's dataset.
        num_files: The number of files of a dataset of files; else None.
        rows: The rows of each process in a global batch of a dataset of files; else None.

    Raises:
        ArgumentError: The policy needs files that this dataset does not have, or is HINT.
    """
    policy = read_own_policy(dataset) if given is None else given
    name = type(dataset).__name__
    if policy is AutoShardPolicy.HINT:
        raise refuse(
            f"auto_shard_policy=HINT and a {name}.",
            "HINT replaces tf.data's marks, dataset.shard(tf.data.experimental.SHARD_HINT, ...), "
            "with the number of the process. Only tf.data can replace them.",
            "Call distribute_datasets_from_function, and shard the dataset in its function: "
            "dataset.shard(context.num_input_pipelines, context.input_pipeline_id).",
        )
    if policy is AutoShardPolicy.FILE and num_files is None:
        raise refuse(
            f"auto_shard_policy=FILE and a {name}.",
            "FILE gives each process a share of the files, and this dataset does not say which "
            "files it reads.",
            "Make the dataset with jaxdist.data.from_files(paths, read, batch_size), or use DATA.",
        )
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE):
        return policy
    if num_files is None or rows is None:
        return AutoShardPolicy.DATA
    count = len(rows)
    if num_files >= count and all(rows):
        return AutoShardPolicy.FILE
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.DATA
    found = (
        f"{num_files} file(s) for {count} processes"
        if num_files < count
        else f"a batch of {sum(rows)} row(s), of which the {count} processes take {[*rows]}"
    )
    raise refuse(
        f"auto_shard_policy=FILE and {found}.",
        "With FILE every process reads one file or more, and takes rows of each batch.",
        f"Give {count} files or more and a larger batch, or use DATA.",
    )
