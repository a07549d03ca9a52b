"""The rows of batches that were not read yet, where a dataset tells."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxdist._values import Ahead, UnevenStep
from jaxdist.data._reading.partial_batch import split_rows


@dataclasses.dataclass(frozen=True)
class RowsAhead:
    """The elements of a pass that come next.

    Attributes:
        count: How many there are; None where they have no end.
        rows: The rows of an element by its number, counted from 0; None where it has none.
        first_short: The first element with fewer rows than a full one, if there is one.
    """

    count: int | None
    rows: Callable[[int], int | None]
    first_short: int | None


class HasRowsAhead(abc.ABC):
    """An iterator that knows the rows of the elements to come."""

    @abc.abstractmethod
    def rows_ahead(self) -> RowsAhead:
        """The rows of the elements that come next."""


def find_uneven_splits(ahead: Sequence[RowsAhead], num_replicas: int, done: int) -> Ahead:
    """The uneven steps where all replicas share one element, after `done` steps."""
    (source,) = ahead

    def rows_of(step: int) -> list[int] | None:
        rows = source.rows(step)
        return None if rows is None else [s.stop - s.start for s in split_rows(rows, num_replicas)]

    return _find_uneven([source.first_short], source.count, rows_of, done)


def find_uneven_groups(ahead: Sequence[RowsAhead], num_replicas: int, done: int) -> Ahead:
    """The uneven steps where each replica takes an element of its own: of one source, or of its.

    Where a source has ended, its replicas have no rows.
    """
    per_step = num_replicas // len(ahead)

    def rows_of(step: int) -> list[int] | None:
        numbers = range(step * per_step, (step + 1) * per_step)
        rows = [_rows_or_zero(s, i) for s in ahead for i in numbers]
        return None if None in rows else [r for r in rows if r is not None]

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
    """Those of these steps, of the next one and of the last of the pass that are uneven."""
    last = None if count is None else count - 1
    known = {c for c in (0, *candidates, last) if c is not None}
    found: list[UnevenStep] = []
    for step in sorted(c for c in known if c >= 0 and (last is None or c <= last)):
        rows = tuple(rows_of(step) or ())
        if len(set(rows)) > 1 and all(f.rows != rows for f in found):
            found.append(UnevenStep(done + step + 1, rows, step == last))
    return tuple(found)
