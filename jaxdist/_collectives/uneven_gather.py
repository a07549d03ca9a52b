"""An all-gather in the trace of an uneven step, whose replicas have different numbers of rows.

# Note [Gathers of uneven rows]
Replicas with equal shapes form a group, and each group has its own trace. The result of an
all-gather has the rows of all groups, but one trace knows only its own number of rows. So the step
is traced in rounds. A `GatherLog` records the rows that a trace passes to each all-gather, in
program order. The next round gives the rows of all groups to every trace. The rounds end when the
rows no longer change.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jaxdist import _compat
from jaxdist._called import name_call
from jaxdist._collectives.marks import fresh_trace_key, shared_trace_key
from jaxdist._typing import AxisNames

# This primitive exists only in the traces of single groups, so it needs no lowering. The code that
# joins the traces replaces it by an all-gather of padded arrays (`gather_padded`).
UNEVEN_ALL_GATHER = Primitive("jaxdist_uneven_all_gather")


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective: the caller, its values by name, and the dims that may differ."""

    caller: str
    values: dict[str, jax.ShapeDtypeStruct]
    free: tuple[int, ...]


@dataclasses.dataclass
class GatherLog:
    """The all-gathers of one trace in program order: assumed rows of all replicas, and own rows.

    `assumed` has the rows of all replicas for each all-gather, from the round before. `seen` has
    the rows that this trace passed. `collectives` has all calls, so that an error can name values
    that do not fit. `averaged` has the rows and lines of averages that assume `num_replicas * rows`
    rows in total. See Note [Gathers of uneven rows].
    """

    assumed: tuple[tuple[int, ...], ...]
    num_replicas: int
    seen: list[int] = dataclasses.field(default_factory=list)
    collectives: list[CollectiveCall] = dataclasses.field(default_factory=list)
    averaged: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        """Remove all records, because the trace starts again."""
        self.seen.clear()
        self.collectives.clear()
        self.averaged.clear()

    def next(self, rows: int) -> tuple[int, ...]:
        """Return the rows of every replica in the next all-gather, and record the own `rows`."""
        number = len(self.seen)
        self.seen.append(rows)
        # In the first round no rows are known. Equal rows are a first guess, so that the trace can
        # continue and record its later gathers.
        known = number < len(self.assumed)
        return self.assumed[number] if known else (rows,) * self.num_replicas


_LOG: ContextVar[GatherLog | None] = ContextVar("jaxdist_gathers", default=None)


@contextlib.contextmanager
def record_gathers(log: GatherLog) -> Iterator[None]:
    """Record the collectives of a trace in `log`."""
    # JAX would otherwise reuse the jaxpr of a nested `jit` from another round, with other rows, and
    # the log would miss the gathers in it.
    with _compat.set_in_block(_LOG, log), fresh_trace_key(), _compat.keep_zero_derivatives():
        yield


@contextlib.contextmanager
def trace_beside_step() -> Iterator[None]:
    """Trace a program that is not part of the step, as if all replicas had equally many rows."""
    with _compat.set_in_block(_LOG, None), shared_trace_key():
        yield


def current_log() -> GatherLog | None:
    """Return the log of the current trace, or None if all replicas have equal shapes."""
    return _LOG.get()


def note_collective(named: dict[str, Any], free: tuple[int, ...] = ()) -> None:
    """Record the shapes that a collective gets, if replicas may have different shapes."""
    log = current_log()
    if log is not None:
        caller = name_call()
        kinds = {n: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for n, x in named.items()}
        log.collectives.append(
            CollectiveCall(f"{caller} at {_compat.find_callers_line()}", kinds, free)
        )


def note_averaged(rows: int) -> None:
    """Record that the caller assumes the same number of rows on every replica."""
    log = current_log()
    if log is not None:
        log.averaged.append((rows, _compat.find_callers_line()))


def uneven_all_gather(
    array: jax.Array, dim: int, axes: AxisNames, sizes: tuple[int, ...]
) -> jax.Array:
    """Return `array` of all replicas, concatenated on `dim`; replica `r` has `sizes[r]` rows."""
    return UNEVEN_ALL_GATHER.bind(array, dim=dim, axis_name=tuple(axes), sizes=tuple(sizes))


def gather_padded(rows: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Return the same all-gather of arrays that are padded to one shape."""
    dim, sizes = params["dim"], params["sizes"]
    # `tiled=True` would leave the padding between the rows of two replicas. As a new dim, each
    # replica's padding can be sliced off.
    every = jax.lax.all_gather(rows, params["axis_name"], axis=0)
    parts = [jax.lax.slice_in_dim(every[r], 0, n, axis=dim) for r, n in enumerate(sizes)]
    return jnp.concatenate(parts, axis=dim)


def _abstract(array: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]) -> Any:
    shape = (*array.shape[:dim], sum(sizes), *array.shape[dim + 1 :])
    return array.update(shape=shape)


def _transpose(
    cotangent: Any, array: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]
) -> list[Any]:
    """Sum the gradients of all replicas, and take the rows of this one."""
    # One program runs on all replicas, so the offset is looked up by the replica's index.
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    start = jnp.asarray(starts)[jax.lax.axis_index(axis_name)]
    total = jax.lax.psum(cotangent, axis_name)
    rows = array.aval.shape[dim]
    return [jax.lax.dynamic_slice_in_dim(total, start, rows, axis=dim)]


def _batch_gather(
    args: Any, dims: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]
) -> tuple[Any, int]:
    array = jnp.moveaxis(args[0], dims[0], 0)
    return uneven_all_gather(array, dim + 1, axis_name, sizes), 0


UNEVEN_ALL_GATHER.def_abstract_eval(_abstract)
ad.deflinear2(UNEVEN_ALL_GATHER, _transpose)
batching.primitive_batchers[UNEVEN_ALL_GATHER] = _batch_gather
