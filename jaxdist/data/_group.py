"""Batches that consist of one element for each replica."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._typing import PyTree
from jaxdist._values import Ahead
from jaxdist.data._assembler import Assembler
from jaxdist.data._pad import make_zeros, pad_rows
from jaxdist.data._reading.ahead import RowsAhead, find_uneven_groups
from jaxdist.data._reading.assemble import GROUP_CALLER
from jaxdist.data._reading.elements import Element, Leaf, describe_array, format_lines
from jaxdist.data._reading.partial_batch import PartialBatch
from jaxdist.data._reading.readers import ENDED
from jaxdist.errors import ShapeError

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
        slots = self._read_slots(raw, index)
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
        columns = [_collect_leaf(slots, i) for i in range(len(present[0].leaves))]
        is_even = all(leaf.shape == column[0].shape for column in columns for leaf in column)
        # One global array is one transfer. Arrays of different shapes cannot be shards of one
        # array, so each one needs its own transfer.
        place = self.placer.join if is_even else self.placer.place_each
        return present[0].treedef.unflatten([place(column) for column in columns])

    def _read_slots(self, raw: list[Any], index: int) -> list[Slot]:
        """Return the element of each replica, in replica order."""
        # Errors give the index of an element in the user's dataset. With one dataset for each
        # replica this is the step; with one for all replicas, a step takes `num_replicas` elements.
        first, stride = (index, 0) if self.is_per_replica else (index * self.num_replicas, 1)
        slots: list[Slot] = [
            None if x is ENDED else self.read(x, first + i * stride) for i, x in enumerate(raw)
        ]
        return slots + [None] * (self.num_replicas - len(slots))

    def _pad(self, slots: list[Slot], present: list[Element], index: int) -> PyTree:
        counts = iter(self.fixed.fit(present, index))
        rows = self.fixed.rows
        # A mask has one flag for each row. If an element has only scalars, it has no rows, and
        # one flag says whether the replica has an element.
        has_rows = any(leaf.ndim for e in present for leaf in e.leaves)
        columns: list[list[Leaf]] = []
        masks: list[Leaf] = []
        for i in range(len(present[0].leaves)):
            column = [pad_rows(x, rows) if x.ndim else x for x in _collect_leaf(slots, i)]
            # `pad_rows` made dim 0 equal, so the shapes can only differ from dim 1 on.
            if any(x.shape != column[0].shape for x in column):
                raise _shapes_differ_error(slots, index, from_dim=1)
            columns.append(column)
        for slot in slots:
            count = 0 if slot is None else next(counts)
            masks.append(np.arange(rows) < count if has_rows else np.asarray(slot is not None))
        batch = [self.placer.join(column) for column in columns]
        return present[0].treedef.unflatten(batch), self.placer.join(masks)

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
            f"{GROUP_CALLER} cannot give every replica a batch in step {index}. {found}\n\n"
            "Each replica takes one element in each step, and none is dropped silently.\n\n"
            f"{remedy} {len(ended)} more; partial_batch=UNEVEN or PAD takes them as they are."
        )


def _collect_leaf(slots: Sequence[Slot], leaf: int) -> list[Leaf]:
    """Return one leaf of every replica; no rows, or a zero for a scalar, if its data has ended."""
    like = next(slot for slot in slots if slot is not None).leaves[leaf]
    empty = (0, *like.shape[1:]) if like.ndim else ()
    return [make_zeros(like, empty) if slot is None else slot.leaves[leaf] for slot in slots]


def _is_uniform(elements: list[Element]) -> bool:
    shapes = [[leaf.shape for leaf in e.leaves] for e in elements]
    return all(s == shapes[0] for s in shapes)


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
        f"{GROUP_CALLER} cannot make one batch of the elements of step {index}.\n"
        f"{format_lines(lines)}\n\n"
        "With partial_batch=ERROR all replicas take arrays of the same shape in one step; with "
        "PAD only dim 0 may differ.\n\n"
        "Make every element the same size (drop_remainder=True leaves an incomplete last batch "
        "out), or use partial_batch=UNEVEN."
    )
