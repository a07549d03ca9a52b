"""Checks of the numbers of rows that a closure computes, for the shards of a table."""

import numpy as np

from jaxdist._parameter_server.closures.traced import TracedClosure
from jaxdist.errors import RowIndexError


def check_rows(closure: TracedClosure, what: str, name: str, ids: np.ndarray) -> None:
    """Check rows of a shard before any server is asked: it knows the shard, and not the table.

    Args:
        closure: The closure.
        what: What it does with the rows, such as `reads`.
        name: The name of the shard on the servers. Other variables are checked there.
        ids: The numbers of the rows, counted from the first row of the shard.

    Raises:
        RowIndexError: One of them is no row of the table.
    """
    part = closure.parts.get(name)
    if part is None:
        return
    wrong = ids[(ids < 0) | (ids >= part.rows)]
    if wrong.size:
        raise RowIndexError(
            f"{closure.name} {what} row {int(wrong[0]) + part.start} of {part.table!r}, which has "
            f"{part.total} rows.\n\n"
            "The numbers of its rows are integers from 0. The function has changed nothing.\n\n"
            f"Pass numbers from 0 to {part.total - 1}, or create the table with more rows."
        )
