"""Which batches a pass over data has yet to give, as far as that is known.

# Note [Batches to come]
The last batch of a pass often has other rows than those before it, and what is wrong with a step
for it would be found at the end of an epoch. So an iterator that knows which batches are uneven
says so in each batch that it gives, and a step that is traced for such a batch is traced for those
as well, before anything runs.
"""

import dataclasses
from typing import Any, TypeAlias

import jax

from jaxdist._values.replicas.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class UnevenStep:
    """A step of a pass over data in which replicas have different numbers of rows."""

    number: int  # counted from 1
    rows: tuple[int, ...]  # of each replica
    is_last: bool

    def __str__(self) -> str:
        which = "the last batch of the data" if self.is_last else "an uneven batch of the data"
        found = f"{sum(self.rows)} rows on {len(self.rows)} replicas"
        return f"step {self.number}, {which} ({found})"


# Uneven steps of the pass that a batch belongs to.
Ahead: TypeAlias = tuple[UnevenStep, ...]


def mark_with_steps_ahead(batch: Any, ahead: Ahead) -> None:
    """Note in the values of a batch which uneven steps its pass has."""
    for leaf in _values_in(batch):
        if isinstance(leaf, PerReplica):
            leaf._ahead = ahead


def steps_ahead(value: PerReplica) -> Ahead:
    """The uneven steps of the pass that gave this value; none where that is not known."""
    found: Ahead = getattr(value, "_ahead", ())
    return found


def copy_steps_ahead(given: Any, to: Any) -> None:
    """Note in a pytree what is noted in the one that it stands for."""
    for old, new in zip(_values_in(given), _values_in(to), strict=True):
        if isinstance(old, PerReplica) and (ahead := steps_ahead(old)):
            mark_with_steps_ahead(new, ahead)


def _values_in(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PerReplica))
