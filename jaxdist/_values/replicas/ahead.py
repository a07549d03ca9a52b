"""Uneven batches that a pass over data will give, as far as its iterator knows them."""

import dataclasses
from typing import Any, TypeAlias

import jax

from jaxdist._values.replicas.agreed import agreed_shapes, mark_with_shapes
from jaxdist._values.replicas.per_replica import PerReplica

# Note [Batches to come]
# The last batch of a pass often has fewer rows than the batches before it. Without this, a user
# would learn at the end of an epoch that the step cannot handle it. So an iterator that knows which
# batches will be uneven attaches this list to each batch that it gives. A step that is traced for
# such a batch is also traced for the uneven ones, before anything runs.


@dataclasses.dataclass(frozen=True)
class UnevenStep:
    """A step of a pass over data for which replicas have different numbers of rows."""

    number: int  # counted from 1
    rows: tuple[int, ...]  # for each replica
    is_last: bool

    def __str__(self) -> str:
        which = "the last batch of the data" if self.is_last else "an uneven batch of the data"
        found = f"{sum(self.rows)} rows on {len(self.rows)} replicas"
        return f"step {self.number}, {which} ({found})"


# All uneven steps of the pass that a batch belongs to.
Ahead: TypeAlias = tuple[UnevenStep, ...]


def mark_with_steps_ahead(batch: Any, ahead: Ahead) -> None:
    """Attach the uneven steps of a pass to the `PerReplica` values of one of its batches."""
    for leaf in _list_values(batch):
        if isinstance(leaf, PerReplica):
            leaf._ahead = ahead


def steps_ahead(value: PerReplica) -> Ahead:
    """Return the uneven steps of the pass that gave this value; `()` if they are not known."""
    # The slot is empty for values that no dataset gave.
    return getattr(value, "_ahead", ())


def copy_steps_ahead(given: Any, to: Any) -> None:
    """Copy what a dataset attached to `given`, also shapes, to `to` of the same structure."""
    for old, new in zip(_list_values(given), _list_values(to), strict=True):
        if not isinstance(old, PerReplica):
            continue
        if ahead := steps_ahead(old):
            mark_with_steps_ahead(new, ahead)
        if (shapes := agreed_shapes(old)) is not None:
            mark_with_shapes(new, shapes)


def _list_values(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PerReplica))
