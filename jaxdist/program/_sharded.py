"""Arrays in pieces on their way into a step and out of it."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist.errors import ShapeError
from jaxdist.mesh import ReplicaMesh
from jaxdist.values import Cut, Sharded, from_state


class HasCut(Protocol):
    """What is looked at of an input."""

    @property
    def cut(self) -> Cut | None:
        """How it is cut, if it is in pieces."""
        ...


def entered(values: Sequence[Any], inputs: Sequence[HasCut]) -> list[Any]:
    """Local values, with the declaration of those that are pieces of one array."""
    return [
        x if slot.cut is None else Sharded(x, *slot.cut)
        for x, slot in zip(values, inputs, strict=True)
    ]


def cuts_of(inputs: Sequence[HasCut]) -> dict[int, Cut]:
    """The inputs that are in pieces, by number."""
    return {i: slot.cut for i, slot in enumerate(inputs) if slot.cut is not None}


def restore_nodes(nodes: Sequence[Any]) -> None:
    """Give variables back the declaration that `nnx.Optimizer.update` took from them."""
    for _, value in nnx.iter_graph(tuple(nodes)):
        if isinstance(value, nnx.Variable):
            held = value.get_raw_value()
            restored = from_state(held)
            if restored is not held:
                value.set_raw_value(restored)


def check_piece(name: str, value: Sharded, layout: ReplicaMesh) -> None:
    """Refuse a piece that is not of the length that its declaration says."""
    rows, have = value.cut.rows(layout.num_replicas), value.array.shape[value.dim]
    if rows != have:
        raise ShapeError(
            f"The step returned {name} as a piece of {have} rows: Sharded(array, "
            f"dim={value.dim}, size={value.size}).\n\n"
            f"{value.size} elements on {layout.num_replicas} replicas are {rows} on each, the "
            "last ones padded.\n\n"
            f"Return an array whose dim {value.dim} has {rows} elements."
        )


def pieces_of(array: Any, cut: Cut, layout: ReplicaMesh) -> list[Any]:
    """The piece of each replica, from the padded array."""
    rows = cut.rows(layout.num_replicas)
    index = [slice(None)] * cut.dim
    return [array[(*index, slice(r * rows, (r + 1) * rows))] for r in range(layout.num_replicas)]


def joined(pieces: Sequence[Any], cut: Cut, layout: ReplicaMesh) -> Sharded:
    """One array from the piece of each replica."""
    first = pieces[0].sharding
    whole = jnp.concatenate([jax.device_put(x, first) for x in pieces], axis=cut.dim)
    return Sharded(jax.device_put(whole, NamedSharding(layout.mesh, cut.spec(layout))), *cut)
