"""A mesh of several processes as each of them sees it, all in one process."""

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Process

# Who owns each of 8 devices: two each, uneven, in turn, and all of one process.
OWNERS = {
    "2+2+2+2": (0, 0, 1, 1, 2, 2, 3, 3),
    "3+1+2+2": (0, 0, 0, 1, 2, 2, 3, 3),
    "in turn": (0, 1, 2, 3, 0, 1, 2, 3),
    "1+0+7+0": (0, 2, 2, 2, 2, 2, 2, 2),
}
# Each of 4 processes owns at least one of 8 devices.
some_owners = st.lists(st.integers(0, 3), min_size=4, max_size=4).flatmap(
    lambda others: st.permutations([0, 1, 2, 3, *others])
)


def view_from(
    layout: ReplicaMesh, index: int, owners: Sequence[int] | None, count: int = 4
) -> ReplicaMesh:
    """The mesh as process `index` of `count` sees it; without owners, those of the devices."""
    own = None if owners is None else tuple(owners)
    return dataclasses.replace(layout, process=Process(index, count), owners=own)


def views(layout: ReplicaMesh, owners: Sequence[int] | None) -> list[ReplicaMesh]:
    """The mesh as each of 4 processes sees it."""
    return [view_from(layout, index, owners) for index in range(4)]
