"""The gather of a step whose replicas bring different numbers of rows, while it is traced.

Each group of replicas with equal shapes has a trace of its own, in which the rows of the others
have to be known. A log carries them from one round of tracing to the next.
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
from jaxdist._collectives.marks.fresh_trace_key import fresh_trace_key
from jaxdist._typing import AxisNames

# Only in the traces of single groups; what joins them puts an all-gather in its place.
UNEVEN_ALL_GATHER = Primitive("jaxdist_uneven_all_gather")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One call of a collective: who, the values by name, and the dims that may differ."""

    caller: str
    values: dict[str, jax.ShapeDtypeStruct]
    free: tuple[int, ...]


@dataclasses.dataclass
class GatherLog:
    """The gathers of one trace, in order: what is assumed of all replicas, and the own rows.

    And all collectives that were asked for, to name their values where they do not fit, and the
    rows and lines of averages that take the number of replicas times the own rows for all rows.
    """

    assumed: tuple[tuple[int, ...], ...]
    num_replicas: int
    seen: list[int] = dataclasses.field(default_factory=list)
    asked: list[Asked] = dataclasses.field(default_factory=list)
    averaged: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        """The trace starts anew."""
        self.seen.clear()
        self.asked.clear()
        self.averaged.clear()

    def next(self, rows: int) -> tuple[int, ...]:
        """The rows of every replica in the next gather, to which this one brings `rows`."""
        number = len(self.seen)
        self.seen.append(rows)
        known = number < len(self.assumed)
        return self.assumed[number] if known else (rows,) * self.num_replicas


_LOG: ContextVar[GatherLog | None] = ContextVar("jaxdist_gathers", default=None)


@contextlib.contextmanager
def logged(log: GatherLog) -> Iterator[None]:
    """Trace with this log."""
    token = _LOG.set(log)
    try:
        with fresh_trace_key():
            yield
    finally:
        _LOG.reset(token)


def current_log() -> GatherLog | None:
    """The log of the trace around the caller, if its replicas may bring different rows."""
    return _LOG.get()


def note_asked(caller: str, named: dict[str, Any], free: tuple[int, ...] = ()) -> None:
    """Keep what a collective is given, where replicas may bring different shapes."""
    log = current_log()
    if log is not None:
        kinds = {n: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for n, x in named.items()}
        log.asked.append(Asked(f"{caller} at {_compat.callers_line()}", kinds, free))


def note_averaged(rows: int) -> None:
    """Keep that the caller takes every replica to have as many rows as this one."""
    log = current_log()
    if log is not None:
        log.averaged.append((rows, _compat.callers_line()))


def uneven_all_gather(
    array: jax.Array, dim: int, axes: AxisNames, sizes: tuple[int, ...]
) -> jax.Array:
    """`array` of all replicas on `dim`, of which replica `r` brings `sizes[r]` rows."""
    whole: jax.Array = UNEVEN_ALL_GATHER.bind(
        array, dim=dim, axis_name=tuple(axes), sizes=tuple(sizes)
    )
    return whole


def gather_padded(rows: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The same from arrays that are padded to one shape."""
    dim, sizes = params["dim"], params["sizes"]
    every = jax.lax.all_gather(rows, params["axis_name"], axis=0)
    parts = [jax.lax.slice_in_dim(every[r], 0, n, axis=dim) for r, n in enumerate(sizes)]
    return jnp.concatenate(parts, axis=dim)


def _abstract(array: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]) -> Any:
    shape = (*array.shape[:dim], sum(sizes), *array.shape[dim + 1 :])
    return array.update(shape=shape)


def _transpose(
    cotangent: Any, array: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]
) -> list[Any]:
    """The gradients of all replicas are summed, and each takes its own rows."""
    if type(cotangent) is ad.Zero:
        return [ad.Zero(array.aval)]
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    start = jnp.asarray(starts)[jax.lax.axis_index(axis_name)]
    total = jax.lax.psum(cotangent, axis_name)
    rows = array.aval.shape[dim]
    return [jax.lax.dynamic_slice_in_dim(total, start, rows, axis=dim)]


def _batch(
    args: Any, dims: Any, *, dim: int, axis_name: Any, sizes: tuple[int, ...]
) -> tuple[Any, int]:
    array = jnp.moveaxis(args[0], dims[0], 0)
    return uneven_all_gather(array, dim + 1, axis_name, sizes), 0


UNEVEN_ALL_GATHER.def_abstract_eval(_abstract)
ad.deflinear2(UNEVEN_ALL_GATHER, lambda ct, x, **params: _transpose(ct, x, **params))
ad.primitive_transposes[UNEVEN_ALL_GATHER] = _transpose
batching.primitive_batchers[UNEVEN_ALL_GATHER] = _batch
