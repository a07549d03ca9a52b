"""Looks up rows of a table that is sharded over the replicas of a step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import _replica
from jaxdist._collectives import current_log
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Cut, Sharded, gather_whole, take_known_rows, take_rows
from jaxdist.cost import exchange_factor, worker_of


def look_up(table: Sharded, ids: Any, dtype: Any) -> jax.Array:
    """Return rows of a sharded table: the replicas exchange them, or gather the whole table.

    Args:
        table: The table. Outside of a step it is whole.
        ids: The indices of rows.
        dtype: The dtype in which rows are sent and returned; None means that of the table.
    """
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step or not isinstance(table.held, jax.core.Tracer):
        whole = jnp.asarray(table.whole())
    else:
        layout: ReplicaMesh = frame.strategy.layout
        # In an uneven step replicas have different numbers of ids; an exchange needs equal numbers.
        if current_log() is None and _is_exchange_shorter(table, ids, layout, dtype):
            return take_rows(table, ids, layout, dtype)
        whole = gather_whole(table, layout, dtype)
    rows = take_known_rows(whole, ids)
    return rows if dtype is None else rows.astype(dtype)


def _is_exchange_shorter(table: Sharded, ids: Any, layout: ReplicaMesh, dtype: Any) -> bool:
    """Whether an exchange of rows is possible, and takes less time than a gather.

    For the gradient, both send the same bytes again, except the ids.
    """
    cut, held = table.cut, table.held
    pieces = cut.pieces(layout)
    if table.is_assigned or pieces == 1 or not 0 < cut.dim < held.ndim:
        return False
    # With Explicit logical axes JAX needs the sharding of the rows.
    is_explicit = bool(jax.sharding.get_abstract_mesh().explicit_axes)
    if held.shape[cut.dim] != cut.size or not held.size or not ids.size or is_explicit:
        return False
    size = np.dtype(held.dtype if dtype is None else dtype).itemsize
    sent = (pieces - 1) / pieces
    of_table = 2 * sent * held.size * size
    of_rows = 2 * sent * ids.size * held.size // held.shape[0] * size
    of_ids = (pieces - 1) * ids.size * ids.dtype.itemsize
    group = _find_group(cut, layout)
    slices = len({worker_of(device) for device in group})
    # The network between slices is the slow one, and a gather sends each piece over it once: the
    # chips of a slice share what they get.
    table_between = of_table / sent / pieces * (slices - 1)
    rows_between = of_rows / sent * (slices - 1) / slices
    if layout.platform == "tpu" and rows_between > table_between:
        return False
    return bool(of_rows * exchange_factor(group) + of_ids < of_table)


def _find_group(cut: Cut, layout: ReplicaMesh) -> list[Any]:
    """Return the devices of one group that exchanges rows."""
    over = cut.over(layout)
    first = tuple(slice(None) if name in over else 0 for name in layout.mesh.axis_names)
    return list(layout.mesh.devices[first].ravel())
