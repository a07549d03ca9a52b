"""What replicas do together, in JAX for one replica and in NumPy for all of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdist
from jaxdist import IndexedSlices
from tests.program.oracle.numpy_values import SIZE, Values, is_above, quarters, whole

AXIS = "replica"
HINTS = jaxdist.experimental.CommunicationOptions(bytes_per_pack=8)


@dataclasses.dataclass(frozen=True)
class Collective:
    """`of_one(x)` in JAX, and `of_all(xs)` in NumPy.

    `is_equal`: whether all replicas get the same. `has_gradient`: whether it is differentiable,
    and `keeps_equal` whether its gradient is the same on all replicas. `of_rows`: the function
    takes the rows of the replica as well.
    """

    of_one: Callable[..., Any]
    of_all: Callable[..., Values]
    is_equal: bool = True
    has_gradient: bool = True
    keeps_equal: bool = True
    has_batching: bool = True
    of_rows: bool = False


def context() -> Any:
    return jaxdist.get_replica_context()


def mean(x: Any) -> Any:
    return context().all_reduce("mean", x)


def _all(fn: Callable[[np.ndarray], Any]) -> Callable[[Values], Values]:
    """What all replicas get of what all of them have."""
    return lambda xs: [fn(np.stack(xs))] * len(xs)


def _weights(count: int) -> Any:
    """A number for each replica."""
    return np.linspace(0.5, 1.5, count).astype("float32")


def _count() -> int:
    return context().num_replicas_in_sync


def _narrow(dtype: Any, op: str) -> Collective:
    """An all-reduce of a narrower dtype, of numbers whose sum is exact in it."""

    def of_one(x: Any) -> Any:
        total = context().all_reduce(op, quarters(jnp, x).astype(dtype))
        assert total.dtype == dtype
        return total.astype("float32")

    def of_all(v: np.ndarray) -> Any:
        v = np.stack([quarters(np, x) for x in v])
        return (v.sum(0) if op == "sum" else v.mean(0)).astype(dtype).astype("float64")

    return Collective(of_one, _all(of_all), has_gradient=False)


def _scattered(x: Any) -> Any:
    rows = _weights(_count())[:, None] * x[None]
    return lax.psum_scatter(rows, AXIS)


def _scattered_in_numpy(xs: Values) -> Values:
    return [w * np.sum(xs, axis=0) for w in _weights(len(xs))]


def _to_all(x: Any) -> Any:
    rows = _weights(_count())[:, None] * x[None]
    return lax.all_to_all(rows, AXIS, 0, 0).sum(0)


def _to_all_in_numpy(xs: Values) -> Values:
    return [w * np.sum(xs, axis=0) for w in _weights(len(xs))]


def _ring(step: int) -> Collective:
    def of_one(x: Any) -> Any:
        count = lax.axis_size(AXIS)
        return lax.ppermute(x, AXIS, [(i, (i + step) % count) for i in range(count)])

    return Collective(
        of_one,
        lambda xs: [xs[(i - step) % len(xs)] for i in range(len(xs))],
        is_equal=False,
        keeps_equal=False,
    )


def _to_few(x: Any) -> Any:
    """Who gets nothing has zeros."""
    return lax.ppermute(x, AXIS, [(0, _count() - 1)])


def _groups(count: int) -> list[list[int]]:
    size = 2 if count % 2 == 0 else 1
    return [list(range(i, i + size)) for i in range(0, count, size)]


def _in_groups(fn: Callable[[np.ndarray], Any]) -> Callable[[Values], Values]:
    def of_all(xs: Values) -> Values:
        found: Values = [None] * len(xs)
        for group in _groups(len(xs)):
            for i in group:
                found[i] = fn(np.stack([xs[j] for j in group]))
        return found

    return of_all


def _gathered(x: Any) -> Any:
    together = context().all_gather(x[None], axis=0)
    return jnp.tanh(together).sum(0) + together[-1]


def _gathered_rows(x: Any, rows: Any) -> Any:
    together = context().all_gather(rows * x[None], axis=0)
    return jnp.tanh(together).sum(0) + together[-1]


def _gathered_rows_in_numpy(xs: Values, rows: Values) -> Values:
    together = np.concatenate([r * x for r, x in zip(rows, xs, strict=True)])
    return [np.tanh(together).sum(0) + together[-1]] * len(xs)


def _gathered_sides(x: Any) -> Any:
    together = context().all_gather(x.reshape(2, 2), axis=1)
    return jnp.tile(together.sum(1), 2) + together[:, :2].reshape(-1)


def _slices(x: Any) -> Any:
    """Rows that replicas add to one table, two of them to the same row."""
    rows = IndexedSlices(jnp.stack([x[:2], x[2:]]), jnp.array([1, 1]), (3, 2))
    total = context().all_reduce("sum", rows)
    table = jnp.zeros((3, 2)).at[total.indices].add(total.values)
    return jnp.concatenate([table[0], table[1]])


def _merge(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: context().merge_call(fn, args=(x,))


def _local_results(strategy: Any, v: Any) -> Any:
    found = strategy.experimental_local_results(v)
    return sum(w * x for w, x in zip(_weights(len(found)), found, strict=True))


def _largest(v: np.ndarray) -> Any:
    return np.max(v, axis=0)


def _booleans(x: Any) -> Any:
    total = context().all_reduce("sum", is_above(jnp, x, 0.0625))
    assert total.dtype == jnp.int32
    return total / 2


COLLECTIVE: dict[str, Collective] = {
    # Of the replica context
    "all_reduce sum": Collective(
        lambda x: context().all_reduce("sum", x), _all(lambda v: v.sum(0))
    ),
    "all_reduce mean": Collective(mean, _all(lambda v: v.mean(0))),
    "all_reduce tree": Collective(
        lambda x: sum(context().all_reduce("sum", {"a": x, "b": x[:1]}).values()),
        _all(lambda v: v.sum(0) + v.sum(0)[:1]),
    ),
    "all_reduce hints": Collective(
        lambda x: sum(context().all_reduce("mean", [x, x * 2, x[::-1]], HINTS)),
        _all(lambda v: 3 * v.mean(0) + v.mean(0)[::-1]),
    ),
    "all_reduce float16": _narrow("float16", "sum"),
    "all_reduce mean float16": _narrow("float16", "mean"),
    "all_reduce bfloat16": _narrow(jnp.bfloat16, "sum"),
    "all_reduce mean bfloat16": _narrow(jnp.bfloat16, "mean"),
    "all_reduce int32": Collective(
        lambda x: context().all_reduce("sum", whole(jnp, x).astype("int32")) / 2,
        _all(lambda v: sum(whole(np, x) for x in v) / 2),
        has_gradient=False,
    ),
    "all_reduce mean int32": Collective(
        lambda x: context().all_reduce("mean", whole(jnp, x).astype("int32")),
        _all(lambda v: sum(whole(np, x) for x in v) / len(v)),
        has_gradient=False,
    ),
    "all_reduce bool": Collective(
        _booleans, _all(lambda v: is_above(np, v, 0.0625).sum(0) / 2), has_gradient=False
    ),
    "all_reduce slices": Collective(
        _slices,
        _all(lambda v: np.concatenate([np.zeros(2), v.sum(0)[:2] + v.sum(0)[2:]])),
        has_gradient=False,
        has_batching=False,
    ),
    "all_gather": Collective(
        _gathered, _all(lambda v: np.tanh(v).sum(0) + v[-1]), keeps_equal=False
    ),
    "all_gather sides": Collective(
        _gathered_sides,
        _all(lambda v: np.tile(v.reshape(-1, 2, 2).sum((0, 2)), 2) + v[0]),
        keeps_equal=False,
    ),
    "all_gather rows": Collective(
        _gathered_rows, _gathered_rows_in_numpy, keeps_equal=False, of_rows=True
    ),
    "all_gather bool": Collective(
        lambda x: context().all_gather(is_above(jnp, x, 0.0625)[None], axis=0).sum(0) * 0.5,
        _all(lambda v: is_above(np, v, 0.0625).sum(0) * 0.5),
        has_gradient=False,
    ),
    "replica_id": Collective(
        lambda x: x + context().replica_id_in_sync_group,
        lambda xs: [x + i for i, x in enumerate(xs)],
        is_equal=False,
    ),
    # Of a merge function
    "merge reduce": Collective(
        _merge(lambda s, v: s.reduce("SUM", v, axis=None)), _all(lambda v: v.sum(0))
    ),
    "merge reduce axis": Collective(
        _merge(lambda s, v: jnp.broadcast_to(s.reduce("MEAN", v, axis=0), (SIZE,))),
        _all(lambda v: np.full(SIZE, v.mean())),
    ),
    "merge reduce_to": Collective(
        _merge(lambda s, v: s.extended.reduce_to("MEAN", v, v)), _all(lambda v: v.mean(0))
    ),
    "merge batch_reduce_to": Collective(
        _merge(lambda s, v: sum(s.extended.batch_reduce_to("SUM", [(v, v), (v, v)]))),
        _all(lambda v: 2 * v.sum(0)),
    ),
    "merge broadcast_to": Collective(
        _merge(lambda s, v: s.extended.broadcast_to(s.reduce("SUM", v, axis=None), v)),
        _all(lambda v: v.sum(0)),
    ),
    "merge gather": Collective(
        _merge(lambda s, v: s.gather(v, axis=0)[-SIZE:]), _all(lambda v: v[-1]), keeps_equal=False
    ),
    "merge local results": Collective(
        _merge(_local_results),
        _all(lambda v: (_weights(len(v))[:, None] * v).sum(0)),
        keeps_equal=False,
    ),
    # Of jax.lax
    "psum": Collective(lambda x: lax.psum(x, AXIS), _all(lambda v: v.sum(0))),
    "psum int32": Collective(
        lambda x: lax.psum(whole(jnp, x).astype("int32"), AXIS) / 2,
        _all(lambda v: sum(whole(np, x) for x in v) / 2),
        has_gradient=False,
    ),
    "psum groups": Collective(
        lambda x: lax.psum(x, AXIS, axis_index_groups=_groups(_count())),
        _in_groups(lambda v: v.sum(0)),
        is_equal=False,
        keeps_equal=False,
    ),
    "pmean": Collective(lambda x: lax.pmean(x, AXIS), _all(lambda v: v.mean(0))),
    "pmax": Collective(lambda x: lax.pmax(x, AXIS), _all(_largest), has_gradient=False),
    "pmin": Collective(
        lambda x: lax.pmin(x, AXIS), _all(lambda v: np.min(v, axis=0)), has_gradient=False
    ),
    "pmax bfloat16": Collective(
        lambda x: lax.pmax(quarters(jnp, x).astype(jnp.bfloat16), AXIS).astype("float32"),
        _all(lambda v: _largest(np.stack([quarters(np, x) for x in v]))),
        has_gradient=False,
    ),
    "pmin float16": Collective(
        lambda x: lax.pmin(quarters(jnp, x).astype("float16"), AXIS).astype("float32"),
        _all(lambda v: np.min(np.stack([quarters(np, x) for x in v]), axis=0)),
        has_gradient=False,
    ),
    "pmax int32": Collective(
        lambda x: lax.pmax(whole(jnp, x).astype("int32"), AXIS) * 0.5,
        _all(lambda v: _largest(np.stack([whole(np, x) for x in v])) * 0.5),
        has_gradient=False,
    ),
    "lax all_gather": Collective(
        lambda x: _weights(_count()) @ lax.all_gather(x, AXIS),
        _all(lambda v: _weights(len(v)) @ v),
        keeps_equal=False,
    ),
    "all_gather groups": Collective(
        lambda x: lax.all_gather(x, AXIS, axis_index_groups=_groups(_count()))[-1],
        _in_groups(lambda v: v[-1]),
        is_equal=False,
        keeps_equal=False,
    ),
    "ppermute": _ring(1),
    "ppermute back": _ring(-1),
    "ppermute few": Collective(
        _to_few,
        lambda xs: [*[np.zeros(SIZE)] * (len(xs) - 1), xs[0]],
        is_equal=False,
        keeps_equal=False,
    ),
    "all_to_all": Collective(_to_all, _to_all_in_numpy, is_equal=False, keeps_equal=False),
    "psum_scatter": Collective(_scattered, _scattered_in_numpy, is_equal=False, keeps_equal=False),
    "axis_index": Collective(
        lambda x: x * (1 + lax.axis_index(AXIS)),
        lambda xs: [x * (1 + i) for i, x in enumerate(xs)],
        is_equal=False,
        keeps_equal=False,
    ),
}
