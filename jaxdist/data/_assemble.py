"""From elements of a dataset to batches of a strategy."""

from typing import Any, Protocol

import jax

from jaxdist._typing import PyTree
from jaxdist.data._elements import Element, ElementReader, brief, listed
from jaxdist.data._place import Placer
from jaxdist.data._sources import ENDED
from jaxdist.errors import ShapeError
from jaxdist.values._per_replica import PerReplica

SPLIT_CALLER = "experimental_distribute_dataset"
GROUP_CALLER = "distribute_datasets_from_function"


class Assembler(Protocol):
    """Makes the batch of one step out of what a reader read."""

    def __call__(self, raw: Any, index: int) -> PyTree:
        """The batch of step `index`."""


class Splitter:
    """Each element is a global batch; every replica takes an equal share of dim 0."""

    def __init__(self, placer: Placer, num_replicas: int) -> None:
        self._read = ElementReader(SPLIT_CALLER)
        self._placer = placer
        self._num_replicas = num_replicas

    def __call__(self, raw: Any, index: int) -> PyTree:
        """The batch of step `index`."""
        element = self._element(raw, index)
        return element.treedef.unflatten([self._placer.split(leaf) for leaf in element.leaves])

    def _element(self, raw: Any, index: int) -> Element:
        element = self._read(raw, index)
        # One replica takes whatever comes, scalars too.
        if self._num_replicas > 1:
            for leaf in element.leaves:
                if not leaf.ndim or leaf.shape[0] % self._num_replicas:
                    raise _cannot_split(element, index, self._num_replicas)
        return element


class Grouper:
    """Each element is the batch of one replica; consecutive ones go to consecutive replicas."""

    def __init__(self, placer: Placer, num_replicas: int, *, is_per_replica: bool) -> None:
        self._read = ElementReader(GROUP_CALLER)
        self._placer = placer
        self._num_replicas = num_replicas
        self._is_per_replica = is_per_replica

    def __call__(self, raw: list[Any], index: int) -> PyTree:
        """The batch of step `index`."""
        num_replicas = self._num_replicas
        present = [x for x in raw if x is not ENDED]
        if len(present) < num_replicas:
            raise self._incomplete(raw, len(present), index)
        stride = 1 if self._is_per_replica else num_replicas
        numbers = [index * stride + (0 if self._is_per_replica else i) for i in range(num_replicas)]
        elements = [self._read(x, n) for x, n in zip(raw, numbers, strict=True)]
        columns = list(zip(*(e.leaves for e in elements), strict=True))
        if any(leaf.shape != column[0].shape for column in columns for leaf in column[1:]):
            raise _shapes_differ(elements, index)
        return elements[0].treedef.unflatten([self._placer.join(column) for column in columns])

    def _incomplete(self, raw: list[Any], count: int, index: int) -> ShapeError:
        num_replicas = self._num_replicas
        missing = num_replicas - count
        if self._is_per_replica:
            dry = [i for i in range(num_replicas) if raw[i] is ENDED]
            found = f"The datasets of replicas {dry} have ended, the others have not."
            drop = f"end every dataset after {index} element(s)"
        else:
            found = (
                f"The dataset ended with {index * num_replicas + count} elements: {count} are "
                f"left for {num_replicas} replicas, {missing} are missing."
            )
            drop = f"drop the last {count} to get {index * num_replicas}"
        remedy = f"Either {drop}, or add {missing} more." if index else f"Add {missing} more."
        return ShapeError(
            f"{GROUP_CALLER} cannot give every replica a batch in step {index}.\n\n{found}\n\n"
            "Each replica takes one element in each step, and none is dropped silently.\n\n"
            f"{remedy}"
        )


def spec_of(batch: PyTree) -> PyTree:
    """Shapes and dtypes of what one replica gets of a batch."""

    def of(leaf: Any) -> jax.ShapeDtypeStruct:
        local = leaf.values[0] if isinstance(leaf, PerReplica) else leaf
        return jax.ShapeDtypeStruct(local.shape, local.dtype)

    return jax.tree.map(of, batch, is_leaf=lambda x: isinstance(x, PerReplica))


def _cannot_split(element: Element, index: int, num_replicas: int) -> ShapeError:
    scalars: list[str] = []
    uneven: list[str] = []
    counts: set[int] = set()
    for name, leaf in zip(element.names(), element.leaves, strict=True):
        if not leaf.ndim:
            scalars.append(f"{name} is a scalar ({leaf.dtype}): it has no dim 0 to split")
        elif leaf.shape[0] % num_replicas:
            rows = leaf.shape[0]
            counts.add(rows)
            uneven.append(
                f"{name} is {brief(leaf)}: dim 0 has {rows} rows, and {rows} is not a multiple "
                f"of {num_replicas}"
            )
    remedies = [_remedy(rows, num_replicas) for rows in sorted(counts)]
    if counts:
        remedies.append("drop_remainder=True leaves an incomplete last batch out.")
    if scalars:
        remedies.append("Give a scalar one value per example, or pass it to the step on its own.")
    return ShapeError(
        f"{SPLIT_CALLER} cannot split element {index} of the dataset over {num_replicas} "
        f"replicas.\n\n{listed(scalars + uneven)}\n\n"
        "Every replica takes an equal share of dim 0.\n\n" + "\n".join(remedies)
    )


def _remedy(rows: int, num_replicas: int) -> str:
    down, up = rows - rows % num_replicas, rows + -rows % num_replicas
    drop = f"drop {rows - down} rows to get {down}, or " if down else ""
    either = "Either " if drop else "For instance "
    return f"{either}{drop}pad with {up - rows} rows to get {up}."


def _shapes_differ(elements: list[Element], index: int) -> ShapeError:
    lines: list[str] = []
    for leaf, name in enumerate(elements[0].names()):
        first = elements[0].leaves[leaf]
        for replica, element in enumerate(elements):
            if element.leaves[leaf].shape != first.shape:
                lines.append(
                    f"{name} is {brief(first)} for replica 0 and {brief(element.leaves[leaf])} "
                    f"for replica {replica}"
                )
                break
    return ShapeError(
        f"{GROUP_CALLER} cannot put the elements of step {index} side by side.\n\n"
        f"{listed(lines)}\n\n"
        "In one step all replicas take arrays of the same shape.\n\n"
        "Make every element the same size: drop or pad an incomplete last batch "
        "(drop_remainder=True)."
    )
