"""Computes the losses that the call of a model adds, as shares of those of the global batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._keras.forward.aligned import NotAlignedError, find_differences
from jaxdist._keras.forward.pairs import Call, Pair, Pairs
from jaxdist._keras.forward.row_rules import OWN, PART, WHOLE, Fact, Kind, Sizes
from jaxdist._keras.forward.whole import Conversions, NotProvedError, Value, WholeProgram
from jaxdist._keras.models import name_of
from jaxdist._keras.rows import Rows
from jaxdist.errors import UnsupportedError

# With one row, arrays are not repeated for each row, so the program for one row is different. The
# program for a few rows may be too, if the layers take some of them (`x[-2:]`, `sort(x)[:3]`).
_LEAST, _ENOUGH = 2, 8


def compute_shares(call: Call, pairs: Pairs, added: Sequence[Any]) -> list[Any]:
    """Return the part of this replica in each loss of the global batch.

    Traces the call for the rows of the replica, and for those of all replicas, as Keras alone
    computes it. The two traces show what kind each value is: see `forward/whole.py`.

    Args:
        call: The call.
        pairs: The traces of the model.
        added: The losses that the call added, without those of weight regularizers.

    Raises:
        UnsupportedError: A loss of the global batch cannot be computed.
    """
    rows = call.rows
    own = [jnp.sum(loss) for loss in added]
    if rows.most == rows.total:
        # One replica has all rows, so the others add nothing.
        return own if rows.own else [jnp.zeros_like(loss) for loss in own]
    sizes = _list_sizes(rows)
    for size in sizes:
        pair = pairs.find(call, (size, rows.total))
        if size == sizes[-1] or all(_is_aligned(pair, n) for n in range(len(added))):
            break
    conversions = Conversions(rows, Sizes(size, rows.total))
    leaves = [_repeat_rows(leaf, size, rows) for leaf in jax.tree.leaves(call.x)]
    inputs = [
        Value(OWN, jnp.asarray(rows.replica.replica_id_in_sync_group, jnp.int32)),
        *(Value(WHOLE, v) for v in (*call.trainable, *call.fixed)),
        *(Value(Fact(Kind.ROWS, 0), leaf) for leaf in leaves),
    ]
    shares: list[Any] = []
    program = WholeProgram(conversions)
    for number in range(len(added)):
        try:
            (own_program, every), used = _find_programs(pair, number)
            [value] = program.run(own_program, every, [inputs[n] for n in used])
            shares.append(_make_share(program, value, rows))
        except NotProvedError as error:
            raise _make_error(call.model, number, len(added), str(error)) from None
    return shares


def _find_programs(pair: Pair, number: int) -> tuple[tuple[Any, Any], Sequence[int]]:
    """Return the programs of a loss for the own rows and for all rows, and their inputs."""
    one, whole = pair.one, pair.more
    if len(one.losses) != len(whole.losses):
        raise NotProvedError("the layers add other losses for another number of rows")
    (own, used), (every, used_of_all) = (
        _compat.drop_unused(f.closed, [f.losses[number]]) for f in (one, whole)
    )
    if used != used_of_all:
        raise NotProvedError("the layers compute something else for another number of rows")
    return (own, every), used


def _list_sizes(rows: Rows) -> list[int]:
    """Return for how many rows the call may be traced: the own rows, and a few more."""
    sizes = [max(rows.own, _LEAST), max(rows.own, _ENOUGH)]
    # The two traces must have different numbers of rows.
    return sorted({size + (size == rows.total) for size in sizes})


def _is_aligned(pair: Pair, number: int) -> bool:
    """Whether the two traces compute a loss by the same operations."""
    try:
        find_differences(*_find_programs(pair, number)[0])
    except (NotAlignedError, NotProvedError):
        return False
    return True


def _make_share(program: WholeProgram, value: Value, rows: Rows) -> Any:
    if value.fact is PART:
        if rows.own:
            return value.array
        # A sum of no rows may be nan. This has a zero gradient, but keeps the collectives of the
        # gradient that the other replicas run.
        return jnp.where(jnp.zeros((), bool), value.array, jnp.zeros_like(value.array))
    whole = jnp.asarray(program.to_whole(value, None).array)
    return whole * jnp.asarray(rows.fraction, whole.dtype)


def _repeat_rows(leaf: Any, size: int, rows: Rows) -> Any:
    """Return `size` rows: those of the replica, padded with copies of its last one.

    A replica without rows repeats the first row of the batch: then its outputs and derivatives are
    as finite as on the replica that has this row.
    """
    own = leaf.shape[0]
    if rows.total <= rows.most * (rows.count - 1):
        is_first = jnp.asarray(rows.replica.replica_id_in_sync_group) == 0
        one = leaf[:1] if own else jnp.zeros((1, *leaf.shape[1:]), leaf.dtype)
        first = rows.add_up(jnp.where(is_first, one, jnp.zeros_like(one)).astype(_summed(leaf)))
        leaf = leaf if own else first.astype(leaf.dtype)
    missing = size - leaf.shape[0]
    return jnp.concatenate([leaf, *[leaf[-1:]] * missing]) if missing else leaf


def _summed(leaf: Any) -> Any:
    return jnp.int32 if leaf.dtype == bool else leaf.dtype


def _make_error(model: Any, number: int, count: int, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"The Keras model {name_of(model)!r} adds {count} loss(es) with add_loss or activity "
        f"regularizers, and the value of number {number} for the rows of all replicas cannot be "
        f"computed: {why}.\n\n"
        "Each replica calls the layers with its own rows. The loss must be a function of the rows "
        "and weights that is the same for every number of rows.\n\n"
        "Compute the loss in compute_loss, which gets the rows of all replicas, or pass a function "
        "to compile(loss=...)."
    )
