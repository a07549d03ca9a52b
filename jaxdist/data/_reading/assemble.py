"""Common parts of `Splitter` and `Grouper`: dropped batches, and the spec of a batch."""

import logging
from typing import Any

import jax

from jaxdist._called import name_call
from jaxdist._typing import PyTree
from jaxdist._values import first_value, is_per_replica
from jaxdist.errors import ShapeError

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
    """Return the error for a pass, or `count` batches in a row, of which all were dropped."""
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
