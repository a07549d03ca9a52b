"""Makes batches of elements: `Splitter` of global batches, `Grouper` of one for each replica."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdist._called import called, name_call
from jaxdist._typing import PyTree
from jaxdist._values import Ahead
from jaxdist.data._place import FixedRows, Placer, make_zeros, pad_rows, spread_rows
from jaxdist.data._reading.ahead import RowsAhead, find_uneven_groups, find_uneven_splits
from jaxdist.data._reading.elements import (
    Element,
    ElementReader,
    Leaf,
    describe_array,
    format_lines,
)
from jaxdist.data._reading.partial_batch import (
    GROUP_CALLER,
    SPLIT_CALLER,
    Drops,
    PartialBatch,
    round_up,
)
from jaxdist.data._reading.readers import ENDED
from jaxdist.errors import ShapeError


@dataclasses.dataclass(eq=False)
class Assembler(abc.ABC):
    """A function that makes the batch of one step from the elements that a reader read.

    Args:
        read: Reads the arrays of an element, and checks its structure.
        placer: Copies leaves to the devices.
        num_replicas: Replicas that take a part of each batch.
        policy: What to do with a step whose elements the replicas cannot share evenly.
        drops: Logs steps that are dropped.
        fixed: The number of rows that padded batches have.
    """

    read: ElementReader
    placer: Placer
    num_replicas: int
    policy: PartialBatch
    drops: Drops
    fixed: FixedRows

    @property
    def padded_rows(self) -> int:
        """Rows to which every batch is padded; 0 without padding, or if that is not known yet."""
        return self.fixed.rows if self.policy is PartialBatch.PAD else 0

    def uneven_steps(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        """Return the uneven steps of a pass with these elements left, after `done` steps."""
        if self.policy is not PartialBatch.UNEVEN or self.num_replicas == 1:
            return ()
        return self._find_uneven(ahead, done)

    @abc.abstractmethod
    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        """Return the steps in which replicas get different numbers of rows."""

    @abc.abstractmethod
    def __call__(self, raw: Any, index: int) -> PyTree:
        """Return the batch made from the reader's result number `index`, `Dropped` or `ENDED`."""

    def leave(self, reason: str) -> None:  # noqa: B027
        """Tell other processes that this one has stopped reading."""

    def count_waits_from(self, needed_since: Callable[[], float | None]) -> None:  # noqa: B027
        """Count time spent waiting for other processes only once the loop needs a batch."""

    def stop_waiting(self) -> None:  # noqa: B027
        """End a wait for other processes, whichever thread waits."""


class Splitter(Assembler):
    """An `Assembler` whose elements are global batches, split over the replicas along dim 0."""

    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        return find_uneven_splits(ahead, self.placer.divide, done)

    def __call__(self, raw: Any, index: int) -> PyTree:
        """Return the batch of element `index`."""
        element = self.read(raw, index)
        # With one replica nothing is split, so scalars are allowed.
        if self.num_replicas > 1 and not all(leaf.ndim for leaf in element.leaves):
            raise cannot_split_error(element, index, self.num_replicas, self.policy)
        if self.policy is PartialBatch.PAD:
            return self._pad(element, index)
        rows = element.rows or 0
        if self.num_replicas == 1 or rows % self.num_replicas == 0:
            return element.treedef.unflatten([self.placer.split(x) for x in element.leaves])
        if self.policy is PartialBatch.UNEVEN:
            return element.treedef.unflatten([self.placer.scatter(x) for x in element.leaves])
        if self.policy is PartialBatch.DROP:
            return self.drops.drop(rows, index)
        raise cannot_split_error(element, index, self.num_replicas, self.policy)

    def _pad(self, element: Element, index: int) -> PyTree:
        (count,) = self.fixed.fit([element], index)
        rows = self.fixed.rows
        has_rows = any(leaf.ndim for leaf in element.leaves)
        if self.placer.balanced and has_rows and self.num_replicas > 1:
            own = self.placer.divide(count)
            spread = functools.partial(spread_rows, own=own, rows=rows // self.num_replicas)
            leaves = [self.placer.split(spread(x)) for x in element.leaves]
            return element.treedef.unflatten(leaves), self.placer.split(
                spread(np.ones(count, bool))
            )
        # Scalars have no dim 0 to pad. They are allowed with one replica only.
        leaves = [self.placer.split(x, rows if x.ndim else None) for x in element.leaves]
        mask = np.arange(rows) < count if has_rows else np.asarray(True)
        return element.treedef.unflatten(leaves), self.placer.split(mask)


@called(SPLIT_CALLER)
def cannot_split_error(
    element: Element, index: int, num_replicas: int, policy: PartialBatch
) -> ShapeError:
    """Return the error for an element whose rows the replicas cannot share."""
    scalars: list[str] = []
    uneven: list[str] = []
    for name, leaf in element.named_leaves():
        if not leaf.ndim:
            scalars.append(f"{name} is a scalar ({leaf.dtype}): it has no dim 0 to split")
        elif policy is PartialBatch.ERROR and leaf.shape[0] % num_replicas:
            rows = leaf.shape[0]
            uneven.append(
                f"{name} is {describe_array(leaf)}: dim 0 has {rows} rows, and {rows} is not a "
                f"multiple of {num_replicas}"
            )
    remedies: list[str] = []
    if uneven:
        remedies.append(_describe_remedy(element.rows or 0, num_replicas))
        remedies.append(
            "drop_remainder=True leaves an incomplete last batch out; partial_batch=UNEVEN or PAD "
            "keeps it."
        )
    if len(scalars) == len(element.leaves):
        remedies.append(
            "Each element is a global batch: if these are single examples, batch them first."
        )
    if scalars:
        remedies.append("Give a scalar one value per example, or pass it to the step on its own.")
    return ShapeError(
        f"{name_call()} cannot split element {index} of the dataset over {num_replicas} "
        f"replicas.\n{format_lines(scalars + uneven)}\n\n"
        "Every replica takes a share of dim 0.\n\n" + "\n".join(remedies)
    )


def _describe_remedy(rows: int, num_replicas: int) -> str:
    down, up = rows - rows % num_replicas, round_up(rows, num_replicas)
    drop = f"drop {rows - down} rows to get {down}, or " if down else ""
    either = "Either " if drop else "For instance "
    return f"{either}{drop}pad with {up - rows} rows to get {up}."


Slot = Element | None  # the element of one replica in a step; None if its data has ended


@dataclasses.dataclass(eq=False)
class Grouper(Assembler):
    """An `Assembler` whose elements are each the batch of one replica, in replica order.

    Args:
        is_per_replica: Whether each replica reads its own dataset.
    """

    is_per_replica: bool

    def _find_uneven(self, ahead: Sequence[RowsAhead], done: int) -> Ahead:
        return find_uneven_groups(ahead, self.num_replicas, done)

    def __call__(self, raw: list[Any], index: int) -> PyTree:
        """Return the batch of step `index`."""
        slots = read_slots(
            self.read, raw, index, self.num_replicas, is_per_replica=self.is_per_replica
        )
        present = [e for e in slots if e is not None]
        if self.policy is PartialBatch.PAD:
            return self._pad(slots, present, index)
        is_full = len(present) == self.num_replicas
        if self.policy is not PartialBatch.UNEVEN and not (is_full and _is_uniform(present)):
            if self.policy is PartialBatch.DROP:
                examples = sum(1 if e.rows is None else e.rows for e in present)
                # No later step can be full once a dataset has ended, so the pass ends here.
                return self.drops.drop(examples, index, is_last=not is_full)
            if is_full:
                raise _shapes_differ_error(slots, index)
            raise self._incomplete_error(slots, index)
        columns = [collect_leaf(slots, present[0], i) for i in range(len(present[0].leaves))]
        is_even = all(leaf.shape == column[0].shape for column in columns for leaf in column)
        # One global array is one transfer. Arrays of different shapes cannot be shards of one
        # array, so each one needs its own transfer.
        place = self.placer.join if is_even else self.placer.place_each
        return present[0].treedef.unflatten([place(column) for column in columns])

    def _pad(self, slots: list[Slot], present: list[Element], index: int) -> PyTree:
        self.fixed.fit(present, index)
        rows = self.fixed.rows
        # A mask has one flag for each row. If an element has only scalars, it has no rows, and
        # one flag says whether the replica has an element.
        has_rows = any(leaf.ndim for e in present for leaf in e.leaves)
        columns: list[list[Leaf]] = []
        for i in range(len(present[0].leaves)):
            whole = collect_leaf(slots, present[0], i)
            column = [pad_rows(x, rows) if x.ndim else x for x in whole]
            # `pad_rows` made dim 0 equal, so the shapes can only differ from dim 1 on.
            if any(x.shape != column[0].shape for x in column):
                raise _shapes_differ_error(slots, index, from_dim=1)
            columns.append(column)
        counts = [None if slot is None else slot.rows or 0 for slot in slots]
        masks = make_masks(counts, rows, has_rows=has_rows)
        batch = [self.placer.join(column) for column in columns]
        return present[0].treedef.unflatten(batch), self.placer.join(masks)

    @called(GROUP_CALLER)
    def _incomplete_error(self, slots: list[Slot], index: int) -> ShapeError:
        num_replicas = self.num_replicas
        ended = [i for i, slot in enumerate(slots) if slot is None]
        if self.is_per_replica:
            found = f"The datasets of replicas {ended} have ended, the others have not."
            drop = f"end every dataset after {index} element(s)"
        else:
            count = num_replicas - len(ended)
            found = (
                f"The dataset ended with {index * num_replicas + count} elements: {count} are "
                f"left for {num_replicas} replicas, {len(ended)} are missing."
            )
            drop = f"drop the last {count} to get {index * num_replicas}"
        remedy = f"Either {drop}, or add" if index else "Add"
        return ShapeError(
            f"{name_call()} cannot give every replica a batch in step {index}. {found}\n\n"
            "Each replica takes one element in each step, and none is dropped silently.\n\n"
            f"{remedy} {len(ended)} more; partial_batch=UNEVEN or PAD takes them as they are."
        )


def read_slots(
    read: ElementReader, raw: Sequence[Any], index: int, count: int, *, is_per_replica: bool
) -> list[Slot]:
    """Return the elements of step `index` for `count` replicas, in replica order."""
    # Errors give the index of an element in the user's dataset. With one dataset for each replica
    # this is the step; with one for all replicas, a step takes `count` elements.
    first, stride = (index, 0) if is_per_replica else (index * count, 1)
    slots: list[Slot] = [
        None if x is ENDED else read(x, first + i * stride) for i, x in enumerate(raw)
    ]
    return slots + [None] * (count - len(slots))


def collect_leaf(slots: Sequence[Slot], like: Element, leaf: int) -> list[Leaf]:
    """Return one leaf of each replica; one without an element has no rows, or a zero."""
    one = like.leaves[leaf]
    empty = (0, *one.shape[1:]) if one.ndim else ()
    return [make_zeros(one, empty) if slot is None else slot.leaves[leaf] for slot in slots]


def make_masks(counts: Sequence[int | None], rows: int, *, has_rows: bool) -> list[Leaf]:
    """Return the mask of each replica: a flag for each row; without rows, one for its element."""
    return [
        np.arange(rows) < (count or 0) if has_rows else np.asarray(count is not None)
        for count in counts
    ]


def _is_uniform(elements: list[Element]) -> bool:
    shapes = [[leaf.shape for leaf in e.leaves] for e in elements]
    return all(s == shapes[0] for s in shapes)


@called(GROUP_CALLER)
def _shapes_differ_error(slots: list[Slot], index: int, *, from_dim: int = 0) -> ShapeError:
    present = [(replica, slot) for replica, slot in enumerate(slots) if slot is not None]
    first_replica, first = present[0]
    lines: list[str] = []
    for leaf, (name, one) in enumerate(first.named_leaves()):
        for replica, element in present:
            other = element.leaves[leaf]
            if one.ndim != other.ndim or one.shape[from_dim:] != other.shape[from_dim:]:
                lines.append(
                    f"{name} is {describe_array(one)} for replica {first_replica} and "
                    f"{describe_array(other)} for replica {replica}"
                )
                break
    return ShapeError(
        f"{name_call()} cannot make one batch of the elements of step {index}.\n"
        f"{format_lines(lines)}\n\n"
        "With partial_batch=ERROR all replicas take arrays of the same shape in one step; with "
        "PAD only dim 0 may differ.\n\n"
        "Make every element the same size (drop_remainder=True leaves an incomplete last batch "
        "out), or use partial_batch=UNEVEN."
    )
