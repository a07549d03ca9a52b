"""`embedding_lookup`: rows of a table by their numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._validate import is_array, show
from jaxdist._values import check_ids
from jaxdist.errors import ArgumentTypeError, ShapeError

_CALLER = "nn.embedding_lookup"


def embedding_lookup(table: Any, ids: Any) -> jax.Array:
    """Return rows of a table, in the order of `ids`.

    Shapes:
        `table` `[rows, ...]` and `ids` `[...]` give `[*ids.shape, *table.shape[1:]]`.

    Cost:
        Of a sharded variable, or one on a parameter server, only the rows that are asked for move,
        each of them once. In a step a table is an input of the program.

    Args:
        table: An array, a `Variable`, or a variable of a `ParameterServerStrategy`.
        ids: Numbers of rows, integers from 0, in any shape.

    Raises:
        ArgumentError: An id is no row of the table. In a step such rows are nan.
        ArgumentTypeError: `table` is no array or variable, or `ids` are no integers.
        ShapeError: `table` is a scalar.

    Example:
        >>> table = Variable([[1.0], [2.0], [3.0]])
        >>> jaxdist.nn.embedding_lookup(table, [2, 0, 2]).ravel().tolist()
        [3.0, 1.0, 3.0]

    Source:
        `tf.nn.embedding_lookup`.
    """
    # `read_rows` moves rows; `sparse_read` of a variable on this machine moves nothing.
    read = getattr(table, "read_rows", None) or getattr(table, "sparse_read", None)
    if read is None and not is_array(table):
        raise ArgumentTypeError(
            f"{_CALLER} was given table={show(table)}.\n\n"
            "table is an array or a variable with a row for each id.\n\n"
            "Pass for instance table=jaxdist.Variable(jnp.ones((100, 8)))."
        )
    if not np.shape(table) if read is None else not table.shape:
        raise ShapeError(
            f"{_CALLER} was given table={show(table)}, a scalar.\n\n"
            "table has a row for each id.\n\nPass an array [rows, ...]."
        )
    found = check_ids(_CALLER, "ids", ids, table)
    if read is None:
        return jnp.take(jnp.asarray(table), found, axis=0, mode="fill")
    if isinstance(found, jax.core.Tracer):
        return jnp.asarray(read(found))
    wanted, places = np.unique(found, return_inverse=True)
    rows = jnp.asarray(read(wanted))
    return rows[places.reshape(found.shape)]
