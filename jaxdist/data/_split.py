"""Splits global batches over the replicas."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdist._typing import PyTree
from jaxdist._values import Ahead
from jaxdist.data._assembler import Assembler
from jaxdist.data._pad import spread_rows
from jaxdist.data._reading.ahead import RowsAhead, find_uneven_splits
from jaxdist.data._reading.assemble import SPLIT_CALLER
from jaxdist.data._reading.elements import Element, describe_array, format_lines
from jaxdist.data._reading.partial_batch import PartialBatch, round_up
from jaxdist.errors import ShapeError


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
        f"{SPLIT_CALLER} cannot split element {index} of the dataset over {num_replicas} "
        f"replicas.\n{format_lines(scalars + uneven)}\n\n"
        "Every replica takes a share of dim 0.\n\n" + "\n".join(remedies)
    )


def _describe_remedy(rows: int, num_replicas: int) -> str:
    down, up = rows - rows % num_replicas, round_up(rows, num_replicas)
    drop = f"drop {rows - down} rows to get {down}, or " if down else ""
    either = "Either " if drop else "For instance "
    return f"{either}{drop}pad with {up - rows} rows to get {up}."
