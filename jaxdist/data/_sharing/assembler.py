"""Assembles the batch of a step together with other processes. See Note [Agreement on rows]."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._values import Ahead
from jaxdist.data._assembler import Assembler, Slot, collect_leaf, make_masks
from jaxdist.data._place import pad_rows
from jaxdist.data._reading.ahead import RowsAhead
from jaxdist.data._reading.elements import Element
from jaxdist.data._reading.partial_batch import PartialBatch
from jaxdist.data._reading.readers import ENDED
from jaxdist.data._sharing.exchange import Exchange, Offer, Structure, make_empty, structure_of
from jaxdist.errors import ProgramMismatchError, ShapeError


@dataclasses.dataclass(eq=False)
class ShareAssembler(Assembler, abc.ABC):
    """An `Assembler` that places the values of the replicas of this process.

    Args:
        layout: The mesh of the strategy; each replica has the devices of one process.
        exchange: The agreement with the other processes; None if all rows are known without one.

    Attributes:
        caller: The name of the function in messages.
    """

    caller: ClassVar[str]
    layout: ReplicaMesh
    exchange: Exchange | None
    _like: Element | None = dataclasses.field(default=None, init=False)

    @called(lambda self: self.caller)
    def __call__(self, raw: Any, index: int) -> PyTree:
        """Return the batch of step `index`, `Dropped`, or `ENDED` if all data has ended."""
        slots = None if raw is ENDED else self._read_slots(raw, index)
        if slots is not None:
            self._like = next((s for s in slots if s is not None), self._like)
            self._check_one_structure(slots, index)
        rows = self._agree(raw, slots, index)
        if all(r is None for r in rows):
            return ENDED
        own = slots or [None] * len(self.layout.local_replicas)
        if self.policy is PartialBatch.PAD:
            return self._pad(own, rows, index)
        if self.policy is not PartialBatch.UNEVEN and len({*rows}) > 1:
            if self.policy is PartialBatch.DROP:
                return self.drops.drop(
                    sum(r or 0 for r in rows), index, is_last=self._is_last(rows)
                )
            raise _uneven_error(rows, self.layout, index)
        like = self._find_like()
        columns = [collect_leaf(own, like, i) for i in range(len(like.leaves))]
        shapes = [[(r or 0, *x.shape[1:]) if x.ndim else () for r in rows] for x in like.leaves]
        place = self.placer.place_own
        placed = [
            place(column, tuple(of_leaf), is_exclusive=self._is_exclusive)
            for column, of_leaf in zip(columns, shapes, strict=True)
        ]
        return like.treedef.unflatten(placed)

    @abc.abstractmethod
    def _read_slots(self, raw: Any, index: int) -> list[Slot]:
        """Return the element of each local replica."""

    def _is_last(self, rows: Sequence[int | None]) -> bool:
        """Whether no later step can be even after one with these rows."""
        return any(r is None for r in rows)

    @property
    def _is_exclusive(self) -> bool:
        return self.placer.has_exclusive_arrays

    def _known_rows(self, raw: Any) -> Sequence[int | None] | None:
        """Return the rows of all replicas if this process can compute them, else None."""
        return None

    def _rows_to_pad_to(self) -> int:
        """Return the rows to which this process pads the value of a replica; 0 means no padding."""
        return self.padded_rows_of_replica if self.policy is PartialBatch.PAD else 0

    def _agree(self, raw: Any, slots: list[Slot] | None, index: int) -> Sequence[int | None]:
        """Return the rows of all replicas; None for a replica without an element."""
        known = self._known_rows(raw)
        own = None if slots is None else [None if s is None else _rows_of(s) for s in slots]
        exchange = self.exchange
        # Without an exchange, this process knows all rows.
        if exchange is None or (known is not None and exchange.has_met):
            return known or ()
        offer = Offer(own, self._rows_to_pad_to(), self._take_progress())
        offers = exchange.share(index, offer, self._own_structure)
        self._add_progress(offers)
        self._agree_on_padding(offers)
        if known is not None:
            # Every process has the same data, so from now on each computes the rows of the others.
            exchange.end()
            return known
        return self._join_rows([o.rows for o in offers])

    def _join_rows(self, offered: Sequence[Sequence[int | None] | None]) -> list[int | None]:
        rows: list[int | None] = []
        places = dict.fromkeys(range(len(offered)), 0)
        for owner in self.layout.replica_owners:
            of_process = offered[owner]
            rows.append(None if of_process is None else of_process[places[owner]])
            places[owner] += 1
        return rows

    def _take_progress(self) -> dict[str, int]:
        return {}

    def _add_progress(self, offers: Sequence[Offer]) -> None:
        pass

    def _agree_on_padding(self, offers: Sequence[Offer]) -> None:
        self.fixed.rows = max(o.padded_rows for o in offers)

    @property
    def _own_structure(self) -> Structure | None:
        return None if self._like is None else structure_of(self._like)

    @called(lambda self: self.caller)
    def _find_like(self) -> Element:
        """Return an element with the structure of this step's elements."""
        agreed = None if self.exchange is None else self.exchange.structure
        if self._like is None and agreed is not None:
            self._like = make_empty(agreed, self.layout.process.index)
        # Some process has an element; otherwise `__call__` would have returned `ENDED`.
        return cast(Element, self._like)

    def _check_one_structure(self, slots: Sequence[Slot], index: int) -> None:
        dims = [[x.shape[1:] if x.ndim else None for x in s.leaves] for s in slots if s is not None]
        if any(d != dims[0] for d in dims):
            raise ShapeError(
                f"{self.caller}: the elements of step {index} differ in more than their rows: "
                f"{dims}.\n\n"
                "With several processes the elements of a step have the same dims after the "
                "rows.\n\nPad these dims to one length."
            )

    def _pad(self, own: Sequence[Slot], rows: Sequence[int | None], index: int) -> PyTree:
        like, count = self._find_like(), self.padded_rows_of_replica
        if max(r or 0 for r in rows) > count:
            raise ShapeError(
                f"{self.caller} cannot pad step {index} to {count} rows for each replica: the "
                f"replicas have {[r or 0 for r in rows]}.\n\n"
                "With partial_batch=PAD all batches are padded to one number of rows, which the "
                "first one decides, so that the step is compiled once.\n\n"
                "Give a batch of the full size first, or use partial_batch=UNEVEN."
            )
        has_rows = any(x.ndim for x in like.leaves)
        columns = []
        for i in range(len(like.leaves)):
            column = collect_leaf(own, like, i)
            columns.append([pad_rows(x, count) if x.ndim else x for x in column])
        owned = [rows[r] for r in self.layout.local_replicas]
        masks = make_masks(owned, count, has_rows=has_rows)
        batch = [self._place_even(column, is_exclusive=self._is_exclusive) for column in columns]
        return like.treedef.unflatten(batch), self._place_even(masks, is_exclusive=True)

    @property
    def padded_rows_of_replica(self) -> int:
        """Rows to which the value of each replica is padded."""
        return self.fixed.rows

    def _place_even(self, column: Sequence[Any], *, is_exclusive: bool) -> Any:
        shapes = (tuple(column[0].shape),) * self.num_replicas
        return self.placer.place_own(column, shapes, is_exclusive=is_exclusive)

    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        return ()

    def leave(self, reason: str) -> None:
        """Tell the other processes that this one has stopped reading."""
        if self.exchange is not None:
            self.exchange.leave(reason)

    def count_waits_from(self, needed_since: Callable[[], float | None]) -> None:
        """Count time spent waiting for other processes only once the loop needs a batch."""
        if self.exchange is not None:
            self.exchange.needed_since = needed_since

    def stop_waiting(self) -> None:
        """End a wait for other processes, whichever thread waits."""
        if self.exchange is not None:
            self.exchange.is_stopped = True


def agreed_padding(offers: Sequence[Offer], own: int) -> int:
    """Return the largest padding of all processes, which must equal that of this process.

    Raises:
        ProgramMismatchError: This process has split its rows for another padding.
    """
    most = max(o.padded_rows for o in offers)
    if own and own != most:
        culprits = [i for i, o in enumerate(offers) if o.padded_rows == most]
        which = ", ".join(f"process {i}" for i in culprits)
        raise ProgramMismatchError(
            f"{name_call()}: {which} pads each replica to {most} rows, and this process to {own}"
            ".\n\nWith partial_batch=PAD all batches have one shape.\n\nGive every process the "
            "same global batches.",
            culprits,
        )
    return most


def _rows_of(element: Element) -> int:
    # An element of scalars counts as one row: only its presence matters.
    return 1 if element.rows is None else element.rows


def _uneven_error(rows: Sequence[int | None], layout: ReplicaMesh, index: int) -> ShapeError:
    by_process: dict[int, list[int]] = {}
    for owner, count in zip(layout.replica_owners, rows, strict=True):
        by_process.setdefault(owner, []).append(count or 0)
    lines = "\n".join(f"  process {p}: {r}" for p, r in sorted(by_process.items()))
    return ShapeError(
        f"{name_call()} cannot give every replica the same number of rows in step {index}; the "
        f"rows of the replicas are:\n{lines}\n\nWith partial_batch=ERROR all replicas take arrays "
        "of the same shape in one step.\n\nMake every batch full (drop_remainder=True), or use "
        "partial_batch=UNEVEN or PAD."
    )
