"""Finds the number of elements of a pass, and their rows, before the pass is read.

See Note [Batches to come].
"""

import abc
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxdist._values import Ahead, UnevenStep
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


@dataclasses.dataclass(frozen=True)
class RowsAhead:
    """The elements of a pass that have not been read yet.

    Attributes:
        count: Number of these elements; None if the pass has no end.
        rows: A function from an element's number, from 0, to its rows; None if it has no rows.
        first_short: The first element with fewer rows than a full one, if one exists.
    """

    count: int | None
    rows: Callable[[int], int | None]
    first_short: int | None


class HasRowsAhead(abc.ABC):
    """An iterator that knows the row counts of its next elements."""

    @abc.abstractmethod
    def rows_ahead(self) -> RowsAhead:
        """Return the row counts of the elements that have not been read yet."""


def find_uneven_splits(
    ahead: Sequence[RowsAhead], divide: Callable[[int], Sequence[slice]], done: int
) -> Ahead:
    """Return the uneven steps after `done` steps, if all replicas share one element per step.

    `divide` returns the rows of each replica.
    """
    (source,) = ahead

    def rows_of(step: int) -> list[int] | None:
        rows = source.rows(step)
        return None if rows is None else [s.stop - s.start for s in divide(rows)]

    return _find_uneven([source.first_short], source.count, rows_of, done)


def find_uneven_groups(ahead: Sequence[RowsAhead], num_replicas: int, done: int) -> Ahead:
    """Return the uneven steps after `done` steps, if each replica takes its own element.

    The elements come from one source for all replicas, or from one source for each replica. A
    replica whose source has ended has no rows.
    """
    # A step takes this many elements of each source.
    per_step = num_replicas // len(ahead)

    def rows_of(step: int) -> list[int] | None:
        numbers = range(step * per_step, (step + 1) * per_step)
        rows = [_rows_or_zero(s, i) for s in ahead for i in numbers]
        return None if None in rows else [r for r in rows if r is not None]

    # A step can be uneven because an element is short, or because one source ends before others.
    first_short = min((s.first_short for s in ahead if s.first_short is not None), default=None)
    ends = [s.count for s in ahead if s.count is not None]
    is_finite = len(ends) == len(ahead)
    numbers = [first_short, min(ends, default=None)]
    steps = [None if n is None else n // per_step for n in numbers]
    return _find_uneven(steps, -(-max(ends) // per_step) if is_finite else None, rows_of, done)


def _rows_or_zero(source: RowsAhead, number: int) -> int | None:
    return 0 if source.count is not None and number >= source.count else source.rows(number)


def _find_uneven(
    candidates: Iterable[int | None],
    count: int | None,
    rows_of: Callable[[int], list[int] | None],
    done: int,
) -> Ahead:
    """Return the uneven steps among the candidates, the next step and the last step of the pass.

    Steps with the same row counts are returned once: they need one trace.
    """
    # Only these few steps are checked. A pass may have millions of steps, and all others have the
    # rows of a full batch.
    last = None if count is None else count - 1
    known = {c for c in (0, *candidates, last) if c is not None}
    found: list[UnevenStep] = []
    for step in sorted(c for c in known if c >= 0 and (last is None or c <= last)):
        rows = tuple(rows_of(step) or ())
        if len(set(rows)) > 1 and all(f.rows != rows for f in found):
            found.append(UnevenStep(done + step + 1, rows, step == last))
    return tuple(found)
