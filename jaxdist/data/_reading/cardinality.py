"""How many elements a dataset has, where it says so."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxdist.data._reading.partial_batch import PartialBatch

INFINITE_CARDINALITY = -1  # the values of `tf.data`
UNKNOWN_CARDINALITY = -2


_LONGEST_LEN = sys.maxsize  # what Grain gives as the length of a dataset without end


def cardinality_of(dataset: Any) -> int:
    """Elements in one pass over `dataset`; `UNKNOWN_CARDINALITY` where it does not tell."""
    own = getattr(dataset, "cardinality", None)
    if isinstance(own, int):
        return own
    if callable(own):  # a tf.data dataset
        return int(own())
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return UNKNOWN_CARDINALITY
    return INFINITE_CARDINALITY if count == _LONGEST_LEN else count


def cardinality_of_steps(elements: Sequence[int], per_step: int, policy: PartialBatch) -> int:
    """Steps in one pass over datasets with that many elements, read side by side.

    Args:
        elements: The cardinality of each dataset.
        per_step: Elements that a step takes of each.
        policy: What becomes of an incomplete step.
    """
    if any(count == UNKNOWN_CARDINALITY for count in elements):
        return UNKNOWN_CARDINALITY
    keeps_all = policy in (PartialBatch.UNEVEN, PartialBatch.PAD)
    finite = [count for count in elements if count != INFINITE_CARDINALITY]
    if not finite or (keeps_all and len(finite) < len(elements)):
        return INFINITE_CARDINALITY
    if policy is PartialBatch.DROP:
        return UNKNOWN_CARDINALITY  # shapes decide
    return -(-max(finite) // per_step) if keeps_all else min(finite) // per_step
