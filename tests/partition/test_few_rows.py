"""Batches of few rows, so that replicas have none, with parameters in pieces: as one device."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica, get_replica_context, partition
from jaxdist.errors import DivergentCollectiveError, ShapeError
from tests.tables import sampled

RNG = np.random.default_rng(0)
SIGNALS = RNG.normal(size=(10, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 8, size=(10, 3)).astype(np.int32)


class _Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (8, 8)))

    def __call__(self) -> Any:
        return jnp.asarray(self.table[...])


def _make_stack(rngs: nnx.Rngs) -> Any:
    return nnx.vmap(lambda r: nnx.Linear(8, 8, rngs=r), in_axes=0, out_axes=0)(rngs.split(2))


def _scan(layers: Any, x: Any) -> Any:
    return nnx.scan(lambda h, layer: (jnp.tanh(layer(h)), None), in_axes=(nnx.Carry, 0))(x, layers)[
        0
    ]


def _where(table: Any, x: Any) -> Any:
    # The rows are in a dim of their own, as a table in pieces is used whole.
    return jnp.where(x[:, None] > 0, x[:, None], table[None]).sum(1)


def _dense(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(8, 8, rngs=rngs)


def _embed(rngs: nnx.Rngs) -> Any:
    return nnx.Embed(8, 8, rngs=rngs)


def _conv(rngs: nnx.Rngs) -> Any:
    return nnx.Conv(1, 8, (3,), rngs=rngs)


def _back(rngs: nnx.Rngs) -> Any:
    return nnx.ConvTranspose(8, 4, (3,), strides=(2,), rngs=rngs)


# Each makes a module, and takes it with rows of numbers and of tokens, to rows of 8 features.
LAYERS: dict[str, tuple[Callable[[nnx.Rngs], Any], Callable[[Any, Any, Any], Any]]] = {
    "dense": (_dense, lambda m, x, t: jnp.tanh(m(x))),
    "embed": (_embed, lambda m, x, t: m(t).sum(1)),
    "attend": (_embed, lambda m, x, t: m.attend(x)),
    "conv": (_conv, lambda m, x, t: m(x[:, :, None]).sum(1)),
    "conv transpose": (_back, lambda m, x, t: m(x[:, None]).reshape(x.shape)),
    "take": (_Table, lambda m, x, t: jnp.take(m(), t[:, 0], axis=0)),
    "take of pieces": (_Table, lambda m, x, t: jnp.take(m.table.get_raw_value(), t[:, 0], axis=0)),
    "where of pieces": (_Table, lambda m, x, t: _where(m.table.get_raw_value(), x)),
    "take along axis": (
        _Table,
        lambda m, x, t: jnp.take_along_axis(x @ m(), t, 1) @ jnp.ones((3, 8)),
    ),
    "index": (_Table, lambda m, x, t: m()[t[:, 0]]),
    "index both": (_Table, lambda m, x, t: m()[t[:, 0], t[:, 1]][:, None] * x),
    "clipped": (_Table, lambda m, x, t: m().at[t[:, 0]].get(mode="clip")),
    "written": (
        _Table,
        lambda m, x, t: jnp.asarray(x).at[jnp.arange(x.shape[0]), t[:, 0]].set(m()[0, 0]),
    ),
    "where": (_Table, lambda m, x, t: jnp.where(x > 0, x, m()[:1] * x)),
    "nan to num": (_Table, lambda m, x, t: jnp.nan_to_num(x @ m())),
    "product": (_Table, lambda m, x, t: x * jnp.prod(1 + m()[:1] + 0 * x.sum(0)[None])),
    "jit": (_Table, lambda m, x, t: jax.jit(lambda w: w[t[:, 0]])(m())),
    "checkpoint": (_Table, lambda m, x, t: jax.checkpoint(lambda w: w[t[:, 0]])(m())),
    "scan": (_make_stack, lambda m, x, t: _scan(m, x)),
    "map": (_Table, lambda m, x, t: jax.lax.map(functools.partial(jnp.matmul, b=m().T), x)),
}


class _Model(nnx.Module):
    """A layer of the table, and a dense layer."""

    def __init__(self, layer: str) -> None:
        make, self._apply = LAYERS[layer]
        self.layer = make(nnx.Rngs(0))
        # The rules of tensor parallelism know this name.
        self.lm_head = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(1))

    def __call__(self, x: Any, t: Any) -> Any:
        return self.lm_head(self._apply(self.layer, x, t))


LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "labels": lambda z, all, t: optax.softmax_cross_entropy_with_integer_labels(z, t[:, 0]),
    "picked": lambda z, all, t: -jax.nn.log_softmax(z)[jnp.arange(z.shape[0]), t[:, 0]],
    "contrastive": lambda z, all, t: jax.nn.logsumexp(z @ all.T, axis=1) - (z * z).sum(1),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of the table."""

    layer: str
    loss: str
    layout: str
    replicas: int
    rows: int
    by_ops: bool

    def __str__(self) -> str:
        how = "op by op" if self.by_ops else "compiled"
        return f"{self.layer}, {self.loss}, {self.layout} {self.replicas}, {self.rows} rows, {how}"


def _list_cells() -> list[Cell]:
    cells = [
        Cell(layer, loss, layout, replicas, rows, by_ops)
        for layer, layout, replicas, by_ops in itertools.product(
            LAYERS, ("whole", "fsdp", "hsdp", "fsdp x tp"), (4, 8), (False, True)
        )
        for rows in range(replicas + 2)
        for loss in [[*LOSSES][(len(layer) + rows) % len(LOSSES)]]
        # Several devices in a replica: the rows have to be equally many.
        if layout != "fsdp x tp" or (rows % replicas == 0 and replicas == 4)
    ]
    # Op by op, 8 replicas have no case that 4 do not have, and take most of the time.
    cells = [c for c in cells if not (c.by_ops and c.replicas == 8)]
    # JAX runs no scan without turns under `disable_jit`.
    return [c for c in cells if not (c.layer == "map" and c.by_ops and _has_none(c))]


def _has_none(cell: Cell) -> bool:
    """Whether a replica has no rows."""
    return len(_split(SIGNALS[: cell.rows], cell.replicas).values[-1]) == 0


def _make_strategy(cell: Cell) -> tuple[jaxdist.MirroredStrategy, Any]:
    devices = np.array(jax.devices()[: cell.replicas])
    if cell.layout == "fsdp x tp":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
        rules: Any = partition.fsdp_tensor_parallel(min_bytes=0)
        return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",)), rules
    if cell.layout == "hsdp":
        mesh = jax.sharding.Mesh(devices.reshape(2, -1), ("group", "data"))
        rules = partition.fsdp(min_bytes=0, axes=("data",))
        return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("group", "data")), rules
    rules = partition.replicated() if cell.layout == "whole" else partition.fsdp(min_bytes=0)
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(cell.replicas)]), rules


def _split(rows: np.ndarray, replicas: int) -> PerReplica:
    """Split rows as TensorFlow does: the last replicas have fewer, or none."""
    each = -(-len(rows) // replicas)
    return PerReplica([rows[r * each : (r + 1) * each] for r in range(replicas)])


def _update(
    model: _Model, optimizer: Any, x: Any, t: Any, kind: str, together: Any, total: Any
) -> Any:
    def loss(model: _Model) -> Any:
        z = model(x, t)
        return LOSSES[kind](z, together(z), t).sum() / 10

    value, grads = total(nnx.value_and_grad(loss)(model))
    optimizer.update(model, grads)
    return value


def _make(layer: str, strategy: Any = None, rules: Any = None) -> tuple[_Model, Any]:
    model = _Model(layer)
    if strategy is None:
        return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    partition.place(strategy, model, rules)
    with strategy.scope():
        return model, nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)


def _values(model: _Model) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


# Rows that differ in strategies only share it.
@functools.cache
def _train_alone(layer: str, loss: str, rows: int) -> tuple[Any, list[np.ndarray]]:
    """Return the loss of one step on one device, and the parameters after it."""
    model, optimizer = _make(layer)
    x, t = SIGNALS[:rows], TOKENS[:rows]
    value = _update(model, optimizer, x, t, loss, lambda z: z, lambda tree: tree)
    return value, _values(model)


# Look-ups, convolutions and losses that compare rows, on replicas without rows.
ALWAYS = [
    Cell("embed", "labels", "fsdp", 4, 2, by_ops=False),
    Cell("conv", "labels", "fsdp", 4, 2, by_ops=False),
    Cell("dense", "contrastive", "whole", 4, 3, by_ops=False),
    Cell("where", "contrastive", "hsdp", 4, 3, by_ops=False),
    Cell("take of pieces", "picked", "fsdp", 4, 3, by_ops=False),
    Cell("take", "picked", "fsdp", 4, 3, by_ops=True),
]
OTHERS = [cell for cell in _list_cells() if cell not in ALWAYS]


@pytest.mark.parametrize("cell", [*sampled(ALWAYS, len(ALWAYS)), *sampled(OTHERS, 4)])
def test_few_rows_give_loss_and_parameters_of_one_device(cell: Cell) -> None:
    strategy, rules = _make_strategy(cell)
    x, t = SIGNALS[: cell.rows], TOKENS[: cell.rows]

    def step(model: Any, optimizer: Any, x: Any, t: Any) -> Any:
        context = get_replica_context()
        return _update(
            model,
            optimizer,
            x,
            t,
            cell.loss,
            lambda z: context.all_gather(z, 0),
            lambda tree: context.all_reduce("sum", tree),
        )

    model, optimizer = _make(cell.layer, strategy, rules)
    expected, values = _train_alone(cell.layer, cell.loss, cell.rows)
    jaxdist.config.run_eagerly(cell.by_ops)
    try:
        batch = [_split(rows, cell.replicas) for rows in (x, t)]
        loss = strategy.run(step, (model, optimizer, *batch))
    finally:
        jaxdist.config.run_eagerly(False)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(_values(model), values, strict=True):
        # The table of some layers has entries far above 1.
        np.testing.assert_allclose(got, wanted, atol=1e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("by_ops", [False, True])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_loss_that_leaves_a_gathered_value_out_without_rows_is_refused(
    is_sharded: bool, by_ops: bool
) -> None:
    strategy, rules = _make_strategy(Cell("dense", "labels", "fsdp", 4, 6, by_ops))
    w: Any = SIGNALS[:8]
    if is_sharded:
        w = partition.place(strategy, w, rules)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            whole = partition.gather(w)
            others = x @ whole if is_sharded else get_replica_context().all_gather(x @ whole, 0)
            return (x @ whole @ others.T).sum() if x.shape[0] else 0.0

        return get_replica_context().all_reduce("sum", jax.value_and_grad(loss)(w))

    jaxdist.config.run_eagerly(by_ops)
    try:
        strategy.run(step, (w, _split(SIGNALS[:8], 4)))
        with pytest.raises((DivergentCollectiveError, ShapeError)) as caught:
            strategy.run(step, (w, _split(SIGNALS[:6], 4)))
    finally:
        jaxdist.config.run_eagerly(False)
    if not by_ops:
        assert "compute the loss with the same operations for every local shape" in str(
            caught.value
        )
