"""Any number of examples, batch size and number of replicas: the numbers of one array.

The oracle is plain JAX and optax on one array. Layers that compute with the examples of one
replica (BatchNorm without `axis_name`, Dropout) train to other weights than one device, so of them
it checks that every example counts once and that evaluations are those of the trained weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import fit
from tests.fit.models import LOSS, mirrored
from tests.tables import sampled

SIDE, CLASSES, WIDTH = 4, 3, 6
AXIS = "replica"
SEED = 3


class Dense(nnx.Module):
    def __init__(self, axis: str | None) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(SIDE, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x[:, 0])))


class Reshape(nnx.Module):
    def __init__(self, axis: str | None) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, 2, (2, 2), rngs=rngs)
        self.out = nnx.Linear(2 * SIDE * SIDE, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.conv(x[..., None])).reshape(x.shape[0], -1))


class Normalized(nnx.Module):
    """Convolution, and statistics over the examples of all replicas, or of one."""

    def __init__(self, axis: str | None) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(1, WIDTH, (2, 2), rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.7, axis_name=axis, rngs=rngs)
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.norm(self.conv(x[..., None]))
        return self.out(jnp.mean(nnx.tanh(normed), axis=(1, 2)))


class SlowVariance(Normalized):
    def __init__(self, axis: str | None) -> None:
        super().__init__(axis)
        self.norm.use_fast_variance = False


class NormalizedAlone(Normalized):
    def __init__(self, axis: str | None) -> None:
        super().__init__(None)


class Recurrent(nnx.Module):
    def __init__(self, axis: str | None) -> None:
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(nnx.GRUCell(SIDE, WIDTH, rngs=rngs))
        self.out = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.rnn(x)[:, -1])


class Dropout(Dense):
    def __init__(self, axis: str | None) -> None:
        super().__init__(axis)
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(SEED))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.tanh(self.hidden(x[:, 0]))))


class KeyedDropout(Dense):
    """Dropout whose numbers are those of the example in the global batch."""

    def __call__(self, x: jax.Array, training: bool = False) -> jax.Array:
        hidden = nnx.tanh(self.hidden(x[:, 0]))
        if training:
            keys = jaxdist.nn.example_keys(jax.random.key(SEED), x.shape[0])
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (WIDTH,)))(keys)
            hidden = jnp.where(kept, hidden * 2, 0)
        return self.out(hidden)


EXACT: dict[str, Any] = {
    "dense": Dense,
    "reshape": Reshape,
    "conv and batch norm over replicas": Normalized,
    "batch norm over replicas, slow variance": SlowVariance,
    "gru": Recurrent,
    "dropout by example": KeyedDropout,
}
OF_A_REPLICA: dict[str, Any] = {"conv and batch norm": NormalizedAlone, "dropout": Dropout}

REPLICAS = (1, 2, 4, 8)
SIZES = [(8, rows) for rows in range(1, 25)]
SIZES += [(32, rows) for rows in (1, 5, 7, 8, 9, 28, 31, 33, 39, 60, 65, 96)]
ROWS = [
    (name, replicas, *size)
    for name in (*EXACT, *OF_A_REPLICA)
    for replicas in REPLICAS
    for size in SIZES
]


class _Counted(fit.Metric):
    """How often the examples of each batch count, from the sum of their numbers."""

    def sums(self, y_true: Any, y_pred: Any, weight: jax.Array) -> dict[str, jax.Array]:
        finite = jnp.all(jnp.isfinite(y_pred), axis=-1)
        return {"rows": jnp.sum(weight * finite), "ids": jnp.sum(weight * y_true)}

    def result(self, sums: Any) -> float:
        return float(sums["rows"]) * 1000 + float(sums["ids"])


@functools.cache
def _data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, SIDE, SIDE)).astype(np.float32)
    return x, rng.integers(0, CLASSES, rows).astype(np.int32)


@functools.cache
def _train_plainly(name: str, size: int, rows: int) -> tuple[list[np.ndarray], list[float]]:
    """The variables after an epoch of plain JAX, and the sum of the losses of each batch."""
    module = EXACT[name](None)
    x, y = _data(rows)
    kwargs: Any = {"training": True} if EXACT[name] is KeyedDropout else {}
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    optimizer = optax.sgd(0.2, momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            losses = LOSS(model(x, **kwargs), y)
            return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), rest, state, loss

    total = []
    for start in range(0, rows, size):
        batch = x[start : start + size], y[start : start + size]
        params, rest, state, loss = step(params, rest, state, *batch)
        total.append(float(loss) * len(batch[1]))
    nnx.update(module, params, rest)
    return _variables_of(module), total


def _variables_of(module: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(v) for v in jax.tree.leaves(nnx.state(module, (nnx.Param, nnx.BatchStat)))]


def train_and_compare(strategy: Any, name: str, size: int, rows: int) -> fit.Model:
    """Train a model for an epoch; it counts each example once, and has the numbers of one array."""
    x, y = _data(rows)
    with strategy.scope():
        model = fit.Model((EXACT.get(name) or OF_A_REPLICA[name])(AXIS))
    model.compile(optax.sgd(0.2, momentum=0.9), LOSS, metrics=[_Counted("counted")])
    found = model.fit(x, y, size, shuffle=False, verbose=0).history
    assert np.isfinite(found["loss"][0])
    assert found["counted"] == [rows * 1000 + y.sum()]
    variables = _variables_of(model.module)
    if name in EXACT:
        wanted, losses = _train_plainly(name, size, rows)
        np.testing.assert_allclose(found["loss"][0], sum(losses) / rows, rtol=1e-4)
        for have, want in zip(variables, wanted, strict=True):
            np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-5)
    assert all(np.isfinite(v).all() for v in variables)
    return model


@pytest.mark.parametrize(
    "row", sampled(ROWS, 8, name=lambda row: f"{row[0]}, {row[1]} replicas, {row[2]}, {row[3]}")
)
def test_training_and_evaluation_are_those_of_one_array(row: Any) -> None:
    name, replicas, size, rows = row
    x, y = _data(rows)
    model = train_and_compare(mirrored(replicas), name, size, rows)
    plain = nnx.clone(model.module)
    plain.eval()
    outputs = plain(x)
    np.testing.assert_allclose(model.predict(x, size), outputs, rtol=1e-4, atol=1e-5)
    loss, counted = model.evaluate(x, y, size, verbose=0)
    np.testing.assert_allclose(loss, LOSS(outputs, y).mean(), rtol=1e-4)
    assert counted == rows * 1000 + y.sum()


def test_batches_are_divided_as_evenly_as_possible() -> None:
    seen: list[int] = []

    class Watched(Dense):
        def __call__(self, x: jax.Array) -> jax.Array:
            seen.append(x.shape[0])
            return super().__call__(x)

    x, y = _data(28)
    with mirrored(8).scope():
        model = fit.Model(Watched(None))
    model.compile("sgd", LOSS)
    model.fit(x, y, 28, verbose=0)
    assert {*seen} == {3, 4}
