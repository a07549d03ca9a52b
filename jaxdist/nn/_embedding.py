"""`embedding_lookup`, which returns rows of a table by their indices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist import _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import current_log
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_floating, is_array, show
from jaxdist._values import Cut, Sharded, check_ids, gather_whole, take_known_rows, take_rows
from jaxdist.cost import exchange_factor, worker_of
from jaxdist.errors import ShapeError


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


@called("nn.embedding_lookup")
def embedding_lookup(table: Any, ids: Any, *, dtype: Any = None) -> jax.Array:
    """Return rows of a table, in the order of `ids`.

    If `partition.place` sharded a table along a dim other than its rows, `partition.Shard(1)`, it
    need not be gathered. In a step each replica looks up the ids of all replicas in its own
    columns, and sends each other replica the columns of its rows. This is done if, by the bytes
    that both send, it takes less time than a gather.

    Shapes:
        `table` `[rows, ...]` and `ids` `[...]` give `[*ids.shape, *table.shape[1:]]`.

    Cost:
        From a sharded variable, or one on a parameter server, only the requested rows move, each of
        them once. In a step a table is an input of the program.

        For a table of T bytes sharded along its columns over R replicas, n ids and rows of w bytes,
        a device sends `(R-1)/R * n * w` bytes in an all-to-all, and its ids in an all-gather; the
        gradient takes another all-to-all. On TPUs the bytes of an all-to-all count
        `cost.exchange_factor` times, and between slices the exchange must not send more than the
        gather, which sends each piece once to each other slice. A gather sends `(R-1)/R * T`, and
        as much for the gradient.

    Args:
        table: An array, a `Sharded` parameter, a variable of NNX that holds one of them, a
            `Variable`, or a variable of a `ParameterServerStrategy`.
        ids: Indices of rows, integers from 0, in any shape. If they are equal on all replicas, the
            rows of a gathered table are proved to be equal, and exchanged rows are a `PerReplica`.
        dtype: The dtype in which floating-point rows and their gradient are sent, and rows are
            returned; None means that of the table. The gradient has the dtype of the table.

    Raises:
        ArgumentError: An id is not a row of the table. In a step, where ids are not known yet,
            such a row is nan, or of integers the smallest value (the largest if unsigned), and it
            has no gradient. Negative ids are not rows.
        ArgumentTypeError: `table` is not an array or variable, `ids` are not integers, or `dtype`
            is not a floating-point dtype.
        ShapeError: `table` is a scalar.

    Example:
        >>> table = Variable([[1.0], [2.0], [3.0]])
        >>> jaxdist.nn.embedding_lookup(table, [2, 0, 2]).ravel().tolist()
        [3.0, 1.0, 3.0]
        >>> strategy = MirroredStrategy()
        >>> rules = partition.Rules({"table": partition.Shard(1)})
        >>> params = partition.place(strategy, {"table": np.eye(64)}, rules)
        >>> ids = jax.device_put(np.arange(8), strategy.per_replica_sharding)
        >>> def step(params, ids):
        ...     return jaxdist.nn.embedding_lookup(params["table"], ids)
        >>> rows = strategy.run(step, (params, ids))
        >>> int(rows.values[3].argmax()), rows.values[3].shape
        (3, (1, 64))
        >>> [c.kind for c in strategy.lower(step, (params, ids)).traced_collectives]
        ['all_gather', 'all_to_all']

    Source:
        `tf.nn.embedding_lookup`; for columns, GSPMD, arXiv:2105.04663.
    """
    if isinstance(table, nnx.Variable) and isinstance(table.get_raw_value(), Sharded):
        table = table.get_raw_value()
    # `read_rows` moves rows; `sparse_read` of a variable on this machine moves nothing.
    read = getattr(table, "read_rows", None) or getattr(table, "sparse_read", None)
    if read is None and not is_array(table):
        raise refuse_type(
            f"table={show(table)}.",
            "table is an array or a variable with a row for each id.",
            "Pass for instance table=jaxdist.Variable(jnp.ones((100, 8))).",
        )
    if not np.shape(table) if read is None else not table.shape:
        raise refuse(
            f"table={show(table)}, a scalar.",
            "table has a row for each id.",
            "Pass an array [rows, ...].",
            kind=ShapeError,
        )
    if dtype is not None:
        dtype = as_floating("dtype", dtype)
        dtype = dtype if jnp.issubdtype(table.dtype, jnp.floating) else None
    found = check_ids("ids", ids, table)
    if isinstance(table, Sharded):
        return look_up(table, jnp.asarray(found), dtype)
    rows = _read(table, read, found)
    return rows if dtype is None else rows.astype(dtype)


def _read(table: Any, read: Any, ids: Any) -> jax.Array:
    """Return rows of an array, or of a variable, which reads each distinct row once."""
    if read is None:
        return take_known_rows(jnp.asarray(table), jnp.asarray(ids))
    if isinstance(ids, jax.core.Tracer):
        return jnp.asarray(read(ids))
    wanted, places = np.unique(ids, return_inverse=True)
    rows = jnp.asarray(read(wanted))
    return rows[places.reshape(ids.shape)]
