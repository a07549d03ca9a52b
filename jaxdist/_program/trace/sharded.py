"""`Sharded` arrays as inputs and results of a step."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.exact import same_bits
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._values import (
    Cut,
    Sharded,
    declare_piece,
    from_state,
    gather_whole,
    is_sharded,
    make_undeclared,
)
from jaxdist.errors import ReplicaValueError, ShapeError

_LOG = logging.getLogger("jaxdist")


def assemble_pieces(
    values: Sequence[Any], inputs: Sequence[InSlot], layout: ReplicaMesh
) -> list[Any]:
    """Return local values, with each local piece replaced by the array that it belongs to."""
    return [
        x if slot.cut is None else declare_piece(x, slot.cut, layout)
        for x, slot in zip(values, inputs, strict=True)
    ]


def wrap_pieces(values: Sequence[Any], inputs: Sequence[InSlot]) -> list[Any]:
    """Return values in which each array in pieces is wrapped into a `Sharded` node."""
    return [
        x if slot.cut is None else make_undeclared(x, slot.cut)
        for x, slot in zip(values, inputs, strict=True)
    ]


def cuts_of(inputs: Sequence[InSlot]) -> dict[int, Cut]:
    """Return the inputs that are in pieces, by number."""
    return {i: slot.cut for i, slot in enumerate(inputs) if slot.cut is not None}


def split_variables(nodes: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the variables of NNX objects by id: those that are whole, and `Sharded` ones."""
    found = [v for _, v in nnx.iter_graph(tuple(nodes)) if isinstance(v, nnx.Variable)]
    cut = {id(v): v for v in found if isinstance(_compat.get_held(v), Sharded)}
    return {id(v): v for v in found if id(v) not in cut}, cut


def restore_nodes(
    variables_before: tuple[dict[int, Any], dict[int, Any]],
    nodes: Sequence[Any],
    layout: ReplicaMesh,
) -> None:
    """Restore the `Sharded` nodes that `nnx.Optimizer.update` removed from variables.

    The structure of NNX objects is fixed, so a variable that came in whole is gathered:
    `sharded_update` cuts each state array that is large enough. The log says if a step gathers
    state in this way.

    Raises:
        ReplicaValueError: A variable came in pieces and would leave the step whole.
    """
    whole, cut = variables_before
    put_together = []
    gathered_bytes: dict[str, int] = {}
    for path, value in nnx.iter_graph(tuple(nodes)):
        if isinstance(value, nnx.Variable):
            held, name = _compat.get_held(value), "/".join(map(str, path[1:]))
            restored = from_state(held)
            if id(value) in whole and is_sharded(restored):
                restored = gather_whole(restored, layout)
                gathered_bytes[name] = restored.size * restored.dtype.itemsize
            if restored is not held:
                value.set_raw_value(restored)
            if id(value) in cut and not is_sharded(restored):
                put_together.append(name)
    if gathered_bytes:
        _LOG.warning(
            "%d NNX variable(s) came in whole, are updated in pieces, and are gathered in every "
            "step, %s bytes: %s%s. Make the optimizer in strategy.scope(), or place it with the "
            "model (jaxdist.partition.place), and it is kept in pieces",
            len(gathered_bytes),
            f"{sum(gathered_bytes.values()):,}",
            ", ".join(list(gathered_bytes)[:5]),
            " ..." if len(gathered_bytes) > 5 else "",
        )
    if put_together:
        more = f" and {len(put_together) - 5} more" if len(put_together) > 5 else ""
        raise ReplicaValueError(
            f"The step gathered {len(put_together)} NNX variable(s) that came in pieces: "
            f"{', '.join(put_together[:5])}{more}.\n\n"
            "The layout of a value is fixed when the step is compiled. An optimizer in pieces "
            "whose model is whole does this.\n\n"
            "Place them together: jaxdist.partition.place(strategy, (model, optimizer), rules)."
        )


def check_piece(name: str, value: Sharded) -> None:
    """Raise if a value does not have the size that its `Sharded` node states."""
    held, dim = value.held, value.dim
    if dim < getattr(held, "ndim", 0) and held.shape[dim] == value.size:
        return
    what = f"{held.dtype}{list(held.shape)}" if hasattr(held, "shape") else repr(held)
    raise ShapeError(
        f"The step returned {name} as an array in pieces, cut along dim {dim} of {value.size} "
        f"elements, and it is {what}.\n\n"
        "A function of pytrees put it there: jax.tree.map enters a Sharded.\n\n"
        "Call the function on whole arrays, jaxdist.partition.gather(tree), or return the "
        "numbers in a pytree of their own: {name: fn(array) for name, array in ...}."
    )


def pieces_of(array: Any, cut: Cut, layout: ReplicaMesh) -> list[Any]:
    """Return the piece of each replica, cut out of the padded array."""
    rows = cut.rows(cut.pieces(layout))
    index = [slice(None)] * cut.dim
    return [array[(*index, slice(n * rows, (n + 1) * rows))] for n in _piece_numbers(cut, layout)]


def _piece_numbers(cut: Cut, layout: ReplicaMesh) -> list[int]:
    """Return the number of the piece that each replica holds."""
    sizes = [layout.mesh.shape[a] for a in layout.replica_axes]
    # An array may be cut along some replica axes only. Replicas along the other axes hold the
    # same piece.
    if cut.axes is None:
        return list(range(layout.num_replicas))
    places = np.stack(np.unravel_index(np.arange(layout.num_replicas), sizes), axis=-1)
    own = [places[:, layout.replica_axes.index(a)] for a in cut.axes]
    flat = np.ravel_multi_index(own, [layout.mesh.shape[a] for a in cut.axes])
    return [int(n) for n in flat]


def have_equal_copies(pieces: Sequence[Any], cut: Cut, layout: ReplicaMesh) -> bool:
    """Whether the replicas that hold the same piece hold the same bits."""
    numbers = _piece_numbers(cut, layout)
    of_piece = [[x for x, m in zip(pieces, numbers, strict=True) if m == n] for n in set(numbers)]
    return all(len(copies) == 1 or same_bits(copies) for copies in of_piece)


def join_pieces(pieces: Sequence[Any], cut: Cut, layout: ReplicaMesh) -> Sharded:
    """Return the array made from the piece of each replica."""
    first = pieces[0].sharding
    numbers = _piece_numbers(cut, layout)
    # Several replicas may hold the same piece; one of them is enough.
    one_each = [pieces[numbers.index(n)] for n in range(cut.pieces(layout))]
    whole = jnp.concatenate([jax.device_put(x, first) for x in one_each], axis=cut.dim)
    return Sharded(jax.device_put(whole, NamedSharding(layout.mesh, cut.full_spec(layout))), *cut)
