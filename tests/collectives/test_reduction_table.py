"""One rule for every way to reduce: what NumPy gives in float64, rounded to the dtype.

Rows are special values (nan, infinities, the largest and the smallest numbers) in every dtype, and
every way in which values of replicas become one.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxdist
from jaxdist import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    NcclAllReduce,
    PerReplica,
    ReductionToOneDevice,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_replica_context,
    sharded_update,
)
from jaxdist.errors import UnevenMeanWarning
from jaxdist.experimental import CollectiveAllReduce, CommunicationOptions
from tests.tables import sampled

COUNT = 8
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int32", "int8", "uint8", "int16", "uint32")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64")
Results = dict[str, Any]


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def values(dtype: str) -> np.ndarray:
    """`[8, cases]`: the value of each replica in each case."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(7)
    if kind == np.bool_:
        return np.stack([rng.random(8) > 0.5, np.ones(8, bool), np.zeros(8, bool)], axis=1)
    if kind.kind in "iu":
        bounds = np.iinfo(kind)
        cases = [[bounds.max] * 8, [bounds.min] * 8, [bounds.max, bounds.min] * 4, [1] * 7 + [0]]
        return np.array([*cases, rng.integers(-3 if bounds.min else 0, 9, 8)]).T.astype(kind)
    real = np.dtype(np.float32) if kind.kind == "c" else kind
    info = ml_dtypes.finfo(real)
    top, tiny, least = (float(v) for v in (info.max, info.tiny, info.smallest_subnormal))
    infinite = float("inf") if dtype != "float8_e4m3fn" else float("nan")
    cases = [
        [float("nan")] + [1.0] * 7,
        [1.0, 2.0, float("nan"), -3.0] * 2,
        [1.0] * 7 + [infinite],
        [-infinite] + [1.0] * 7,
        [infinite, -infinite] * 4,
        [-0.0] * 8,
        [0.0, -0.0] * 4,
        [top] * 8,
        [-top] * 8,
        [top, 1.0, -top, 0.0] * 2,
        [top / 2] * 7 + [0.0],
        [tiny] * 8,
        [tiny, -tiny * 2] * 4,
        [least] * 8,
        [least * 3] * 7 + [0.0],
        list(rng.normal(size=8)),
        list(10 * rng.normal(size=8)),
    ]
    found = np.array(cases).T.astype(real)
    if kind.kind != "c":
        return found
    return (found + 1j * np.where(np.isfinite(found), 1, 0)).astype(kind)


def expected(op: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The result in float64, and in which cases the dtype can tell it.

    Sums of floats are made in their dtype, so what is over by the way, and comes back, may be inf.
    """
    wide = rows.astype(np.complex128 if rows.dtype.kind == "c" else np.float64)
    if rows.dtype.kind in "iu" and op == "sum":
        return rows.astype(np.int64).sum(0).astype(rows.dtype), np.ones(rows.shape[1], bool)
    with np.errstate(all="ignore"):
        if op in ("max", "min"):
            return (np.max if op == "max" else np.min)(wide, axis=0), np.ones(len(wide.T), bool)
        total = wide.sum(0)
        if op == "mean":
            is_complex = rows.dtype.kind == "c"
            parts = [total.real / COUNT, total.imag / COUNT] if is_complex else [total / COUNT]
            mean = np.empty_like(total)
            mean.real = parts[0]
            if is_complex:
                mean.imag = parts[1]
            return mean, np.ones(len(total), bool)
        if rows.dtype.kind in "iub":
            return total, np.ones(len(total), bool)
        largest = float(ml_dtypes.finfo(rows.real.dtype).max)
        sizes = np.abs(np.nan_to_num(wide, nan=0, posinf=0, neginf=0)).sum(0)
        return total, sizes < largest * 0.99


def check(results: Results, rows: np.ndarray, *, rounded: float = 1.0, hint: str = "") -> None:
    """Compare what a way gave with NumPy, case by case, nan and infinities included."""
    for op, got in results.items():
        want, is_told = expected(op, rows)
        own = got.values[-1] if isinstance(got, PerReplica) else got
        found = np.asarray(own).reshape(-1)[: rows.shape[1]]
        where = f"{hint} {op} {rows.dtype}"
        kept = rows.dtype if rows.dtype.kind not in "iub" or op in ("max", "min") else None
        kept = rows.dtype if rows.dtype.kind in "iu" and op == "sum" else kept
        if kept is not None:
            assert found.dtype == kept, where
        real = found.real.dtype if found.dtype.kind == "c" else found.dtype
        if real.kind in "iub":
            np.testing.assert_array_equal(found, want.astype(found.dtype), err_msg=where)
            continue
        info = ml_dtypes.finfo(real)
        # What is subnormal may be 0, and a mean is made of eighths.
        small = 0.0 if op in ("max", "min") else COUNT * float(info.tiny)
        if real == np.float16 and op == "mean":
            small = float(info.smallest_subnormal)
        if hint == "rows_of_slices":  # each row is divided, and small ones are rounded
            small = COUNT * max(float(info.tiny), float(info.smallest_subnormal))
        if op in ("max", "min"):
            small = float(info.tiny)
        else:  # what is left of large numbers that cancel each other
            sizes = np.abs(rows.astype(np.complex128))
            finite = np.where(np.isfinite(sizes), sizes, 0)
            small = small + float(info.eps) * finite.sum(0)[is_told]
        with np.errstate(all="ignore"):
            for part in (np.real, np.imag):
                mine, theirs = (part(x).astype(np.float64)[is_told] for x in (found, want))
                over = np.abs(theirs) > float(info.max)
                theirs = np.where(over, np.sign(theirs) * np.inf, theirs)
                if "e4m3fn" in str(real):  # has no infinity
                    theirs = np.where(over, np.nan, theirs)
                tolerance = rounded * COUNT * float(info.eps)
                with_room = np.where(np.isfinite(theirs), tolerance * np.abs(theirs) + small, 0)
                same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
                near = np.isfinite(mine) & (np.abs(mine - theirs) <= with_room)
                bad = ~(same | near)
                assert not bad.any(), (where, rows.T[is_told][bad], mine[bad], theirs[bad])


# Ways. Each gives the results of the reductions that it has.

OPS = ("sum", "mean")


def _given(rows: np.ndarray) -> PerReplica:
    return PerReplica(list(rows))


def _all_reduced(rows: np.ndarray, strategy: Any = None, **kwargs: Any) -> Results:
    def step(x: Any) -> Results:
        replica = get_replica_context()
        return {op: replica.all_reduce(op, x, **kwargs) for op in OPS}

    results: Results = (strategy or MirroredStrategy()).run(step, (_given(rows),))
    return results


def _op_by_op(rows: np.ndarray) -> Results:
    with jaxdist.config.run_eagerly():
        return _all_reduced(rows)


def _deterministic(rows: np.ndarray) -> Results:
    return _all_reduced(rows, MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True))


def _in_packs(rows: np.ndarray) -> Results:
    return _all_reduced(rows, options=CommunicationOptions(bytes_per_pack=4))


def _with_uneven_rows(rows: np.ndarray) -> Results:
    def step(x: Any, more: Any) -> Results:
        replica = get_replica_context()
        return {op: replica.all_reduce(op, (x, more.sum()))[0] for op in OPS}

    more = PerReplica([np.ones(r % 3 + 1, np.float32) for r in range(COUNT)])
    with warnings.catch_warnings():
        # The mean over the replicas is what the table is about.
        warnings.simplefilter("ignore", UnevenMeanWarning)
        results: Results = MirroredStrategy().run(step, (_given(rows), more))
    return results


def _reduced(rows: np.ndarray) -> Results:
    return {op: MirroredStrategy().reduce(op, _given(rows), axis=None) for op in OPS}


def _reduced_from_devices(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy()
    held = strategy.run(lambda x: x, (_given(rows),))
    return {op: strategy.reduce(op, held, axis=None) for op in OPS}


def _reduced_large(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy()
    wide = np.concatenate([rows, np.zeros((COUNT, 40_000), rows.dtype)], axis=1)
    held = strategy.run(lambda x: x, (_given(wide),))
    return {op: strategy.reduce(op, held, axis=None) for op in OPS}


def _reduced_over_rows(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy()
    return {op: strategy.reduce(op, _given(rows[:, None]), axis=0) for op in OPS}


def _reduced_virtual(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True)
    held = strategy.run(lambda x: x, (_given(rows),))
    return {op: strategy.reduce(op, held, axis=None) for op in OPS}


def _reduced_in_function(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy()

    @jaxdist.function
    def call(x: Any) -> Results:
        held = strategy.run(lambda v: v, (x,))
        return {op: strategy.reduce(op, held, axis=None) for op in OPS}

    results: Results = call(_given(rows))
    return results


def _reduce_to(rows: np.ndarray) -> Results:
    extended = MirroredStrategy().extended
    return {op: extended.reduce_to(op.upper(), _given(rows), "cpu:0") for op in OPS}


def _batch_reduce_to(rows: np.ndarray) -> Results:
    extended = MirroredStrategy().extended
    return {
        op: extended.batch_reduce_to(op.upper(), [(_given(rows), "cpu:0")] * 2)[1] for op in OPS
    }


def _merged(rows: np.ndarray) -> Results:
    def merge(strategy: Any, x: Any) -> Results:
        return {op: strategy.reduce(op, x, axis=None) for op in OPS}

    results: Results = MirroredStrategy().run(
        lambda x: get_replica_context().merge_call(merge, (x,)), (_given(rows),)
    )
    return results


def _read_variable(rows: np.ndarray, *, virtual: bool = False) -> Results:
    devices = ["cpu:0", "cpu:1"] if virtual else None
    strategy = MirroredStrategy(devices, deterministic=virtual)
    results: Results = {}
    for op in OPS:
        with strategy.scope():
            held = Variable(
                np.zeros(rows.shape[1], rows.dtype),
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation[op.upper()],
            )
        strategy.run(lambda x, held=held: held.assign(x, read_value=False), (_given(rows),))
        results[op] = held.read_value()
    return results


def _assigned(rows: np.ndarray) -> Results:
    strategy = MirroredStrategy()
    results: Results = {}
    for op in OPS:
        with strategy.scope():
            held = Variable(
                np.zeros(rows.shape[1], rows.dtype), aggregation=VariableAggregation[op.upper()]
            )
        strategy.run(lambda x, held=held: held.assign(x, read_value=False), (_given(rows),))
        results[op] = held.read_value()
    return results


class _Statistics(nnx.Module):
    def __init__(self, rows: np.ndarray) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(rows.shape[1], rows.dtype))


def _batch_statistics(rows: np.ndarray, *, op_by_op: bool = False) -> Results:
    model = _Statistics(rows)

    def step(model: Any, x: Any) -> None:
        model.mean.set_value(x)

    with jaxdist.config.run_eagerly(op_by_op):
        MirroredStrategy().run(step, (model, _given(rows)))
    return {"mean": model.mean.get_value()}


def _sharded(rows: np.ndarray, *, in_pieces: bool = True) -> Results:
    results: Results = {}
    for op in OPS:
        tx = sharded_update(
            optax.identity(), reduce_op=op, min_bytes=0 if in_pieces else float("inf")
        )
        strategy = MirroredStrategy()

        def step(grads: Any, tx: Any = tx) -> Any:
            return tx.update(grads, tx.init(jnp.zeros_like(grads)))[0]

        results[op] = strategy.run(step, (_given(rows),))
    return results


def _rows_of_slices(rows: np.ndarray) -> Results:
    def step(x: Any) -> Results:
        slices = jaxdist.IndexedSlices(x[None], jnp.array([1]), (2, x.shape[0]))
        replica = get_replica_context()
        return {op: replica.all_reduce(op, slices).to_dense()[1] for op in OPS}

    results: Results = MirroredStrategy().run(step, (_given(rows),))
    return results


def _users_own(rows: np.ndarray, strategy: Any = None) -> Results:
    """JAX's collectives, large enough for XLA to divide its local reductions among threads."""
    width = rows.shape[1]
    wide = np.concatenate([rows, np.zeros((COUNT, 9_000), rows.dtype)], axis=1)

    def step(x: Any) -> Results:
        axis: Any = "replica"
        found = {"max": lax.pmax(x, axis), "min": lax.pmin(x, axis), "sum": lax.psum(x, axis)}
        return {op: v[:width] for op, v in found.items()}

    results: Results = (strategy or MirroredStrategy()).run(step, (_given(wide),))
    return results


def _users_own_op_by_op(rows: np.ndarray) -> Results:
    with jaxdist.config.run_eagerly():
        return _users_own(rows)


def _users_own_virtual(rows: np.ndarray) -> Results:
    return _users_own(rows, MirroredStrategy(["cpu:0", "cpu:1"], deterministic=True))


def _users_own_nested(rows: np.ndarray) -> Results:
    """In a loop, a branch and under `vmap`, in groups of all."""

    def step(x: Any) -> Results:
        axis: Any = "replica"
        looped = lax.fori_loop(0, 2, lambda _, v: lax.pmax(v, axis), x)
        branched = lax.cond(lax.psum(1, axis) > 0, lambda v: lax.pmin(v, axis), lambda v: v, x)
        return {"max": looped, "min": branched}

    results: Results = MirroredStrategy().run(step, (_given(rows),))
    return results


def _users_own_logical(rows: np.ndarray) -> Results:
    """With an axis that is left to GSPMD."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "logical"))
    strategy = MirroredStrategy(mesh=mesh, replica_axes=("replica",))

    def step(x: Any) -> Results:
        both = lax.pmax(x[0], "replica"), lax.pmin(x[1], "replica")
        more = lax.pmax(x[1], "replica"), lax.pmin(x[0], "replica")
        return {"max": lax.max(both[0], more[0]), "min": lax.min(both[1], more[1])}

    pairs = PerReplica([rows[2 * r : 2 * r + 2] for r in range(4)])
    results: Results = strategy.run(step, (pairs,))
    return results


def _users_scatter(rows: np.ndarray) -> Results:
    """A sum that is scattered, and everything gathered and reduced by hand."""

    def step(x: Any) -> Results:
        axis: Any = "replica"
        whole = jnp.concatenate([x, jnp.zeros(-x.size % COUNT, x.dtype)])
        part = lax.psum_scatter(whole, axis, tiled=True)
        return {"sum": lax.all_gather(part, axis, tiled=True)[: x.size]}

    results: Results = MirroredStrategy().run(step, (_given(rows),))
    return results


def _alone(ops: CrossDeviceOps, rows: np.ndarray) -> Results:
    return {op: ops.reduce(op.upper(), _given(rows), "cpu:0") for op in OPS}


def _alone_in_batches(ops: CrossDeviceOps, rows: np.ndarray) -> Results:
    pairs = [(_given(rows), "cpu:0"), (_given(rows[:, :1]), "cpu:1")]
    return {op: ops.batch_reduce(op.upper(), pairs)[0] for op in OPS}


def _in_steps(ops: CrossDeviceOps, rows: np.ndarray) -> Results:
    return _all_reduced(rows, MirroredStrategy(cross_device_ops=ops))


def _workers(spec: Any) -> CrossDeviceOps:
    names = ["/job:worker/task:0", "/job:worker/task:1"]
    return jaxdist.contrib.MultiWorkerAllReduce(
        names, num_gpus_per_worker=4, all_reduce_spec=[(spec, 1, -1)]
    )


def _ops() -> dict[str, CrossDeviceOps]:
    algorithms = "nccl nccl/pscpu xring psgpu pscpu nccl/xring nccl/rechd pscpu/pscpu".split()
    return {
        "CollectiveAllReduce": CollectiveAllReduce(),
        "NcclAllReduce": NcclAllReduce(),
        "NcclAllReduce(2)": NcclAllReduce(2),
        "HierarchicalCopyAllReduce": HierarchicalCopyAllReduce(),
        "ReductionToOneDevice": ReductionToOneDevice(),
        "ReductionToOneDevice(cpu:3)": ReductionToOneDevice("cpu:3"),
        "AllReduceCrossDeviceOps": jaxdist.contrib.AllReduceCrossDeviceOps("nccl", 3),
        "AllReduceCrossDeviceOps(hierarchical)": jaxdist.contrib.AllReduceCrossDeviceOps(
            "hierarchical_copy"
        ),
        **{f"MultiWorkerAllReduce({a})": _workers(a) for a in algorithms},
    }


def _ways() -> Iterator[tuple[str, Callable[[np.ndarray], Results]]]:
    plain = [
        _all_reduced,
        _op_by_op,
        _deterministic,
        _in_packs,
        _with_uneven_rows,
        _reduced,
        _reduced_from_devices,
        _reduced_large,
        _reduced_over_rows,
        _reduced_virtual,
        _reduced_in_function,
        _reduce_to,
        _batch_reduce_to,
        _merged,
        _read_variable,
        _assigned,
        _batch_statistics,
        _sharded,
        _rows_of_slices,
        _users_own,
        _users_own_op_by_op,
        _users_own_virtual,
        _users_own_nested,
        _users_own_logical,
        _users_scatter,
    ]
    yield from ((way.__name__.strip("_"), way) for way in plain)
    yield "read_variable_virtual", functools.partial(_read_variable, virtual=True)
    yield "batch_statistics_op_by_op", functools.partial(_batch_statistics, op_by_op=True)
    yield "sharded_whole", functools.partial(_sharded, in_pieces=False)
    for name, ops in _ops().items():
        yield f"{name} alone", functools.partial(_alone, ops)
        yield f"{name} alone in batches", functools.partial(_alone_in_batches, ops)
        yield f"{name} in steps", functools.partial(_in_steps, ops)


WAYS = dict(_ways())
# What a way does not have: variables that are averaged are floats, gradients and statistics too.
ONLY_FLOATS = ("read_variable", "assigned", "batch_statistics", "sharded")


def _rows_of_the_table() -> list[str]:
    found = []
    for way in WAYS:
        for dtype in DTYPES:
            if dtype in (*INTEGERS, "bool") and way.startswith(ONLY_FLOATS):
                continue
            if dtype.startswith("float8") and way == "rows_of_slices":
                continue  # shares of rows are added up in their dtype, when they are made dense
            if dtype == "complex64" and way.startswith("users_own"):
                continue  # JAX has no maximum of complex numbers
            if dtype == "bool" and way.startswith("users"):
                continue  # and no sum of booleans that is one
            found.append(f"{way}: {dtype}")
    return found


@pytest.mark.parametrize("row", sampled(_rows_of_the_table(), 12))
def test_every_way_to_reduce_gives_what_numpy_gives(row: str) -> None:
    way, _, dtype = row.partition(": ")
    rows = values(dtype)
    check(WAYS[way](rows), rows, hint=way)


ALWAYS = [
    ("all_reduced", "float16"),
    ("all_reduced", "float32"),
    ("read_variable", "float16"),
    ("users_own", "float32"),
    ("users_own_op_by_op", "float32"),
]


@pytest.mark.parametrize(("way", "dtype"), ALWAYS)
def test_means_do_not_overflow_and_maxima_keep_nan(way: str, dtype: str) -> None:
    rows = values(dtype)
    check(WAYS[way](rows), rows, hint=way)
