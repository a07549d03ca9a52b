"""Finds the number of elements of a dataset, if the dataset reports it."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxdist.data._reading.partial_batch import PartialBatch

INFINITE_CARDINALITY = -1  # the values of `tf.data`
UNKNOWN_CARDINALITY = -2


_LONGEST_LEN = sys.maxsize  # Grain's `len` of a dataset without end


def cardinality_of(dataset: Any) -> int:
    """Return the number of elements in one pass, or `UNKNOWN_CARDINALITY` if it is not reported."""
    own = getattr(dataset, "cardinality", None)
    if isinstance(own, int):
        return own
    if callable(own):  # a tf.data dataset
        return int(own())
    # PyTorch's loaders have `__len__` and raise TypeError if their dataset has none.
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return UNKNOWN_CARDINALITY
    return INFINITE_CARDINALITY if count == _LONGEST_LEN else count


def cardinality_of_steps(elements: Sequence[int], per_step: int, policy: PartialBatch) -> int:
    """Return the number of steps in one pass over several datasets that are read in parallel.

    Args:
        elements: The cardinality of each dataset.
        per_step: Number of elements that a step takes from each dataset.
        policy: What to do with an incomplete step.
    """
    if any(count == UNKNOWN_CARDINALITY for count in elements):
        return UNKNOWN_CARDINALITY
    # UNEVEN and PAD continue until the last dataset ends; ERROR ends with the first one.
    keeps_all = policy in (PartialBatch.UNEVEN, PartialBatch.PAD)
    finite = [count for count in elements if count != INFINITE_CARDINALITY]
    if not finite or (keeps_all and len(finite) < len(elements)):
        return INFINITE_CARDINALITY
    if policy is PartialBatch.DROP:
        return UNKNOWN_CARDINALITY  # depends on the shapes of the elements
    return -(-max(finite) // per_step) if keeps_all else min(finite) // per_step
