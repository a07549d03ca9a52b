"""How many elements a dataset has, where it says so."""

from typing import Any

INFINITE_CARDINALITY = -1  # the values of `tf.data`
UNKNOWN_CARDINALITY = -2


def cardinality_of(dataset: Any) -> int:
    """Elements in one pass over `dataset`; `UNKNOWN_CARDINALITY` where it does not tell."""
    own = getattr(dataset, "cardinality", None)
    if isinstance(own, int):
        return own
    try:
        return len(dataset)
    except TypeError:
        return UNKNOWN_CARDINALITY
