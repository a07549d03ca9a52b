"""BatchNorm that trains and dropout, where replicas have any numbers of rows, or none.

The oracle is one device that has all rows, and knows which replica has which: it normalizes the
rows of each replica by themselves, and draws the mask of each example by its number.
"""

import itertools
import random
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import NoRowsError, UnevenMeanWarning
from tests.tables import sampled

WIDTH, HIDDEN, CLASSES = 3, 4, 2
RATE, MOMENTUM, EPSILON = 0.1, 0.9, 1e-3
KINDS = ("without parameters", "with parameters", "of all replicas")


def _ctx() -> Any:
    return jaxdist.get_replica_context()


class Net(nnx.Module):
    """Two layers with a norm and dropout between them."""

    def __init__(self, kind: str) -> None:
        rngs = nnx.Rngs(0)
        trained = kind == "with parameters"
        self.inner = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(
            HIDDEN,
            momentum=MOMENTUM,
            epsilon=EPSILON,
            use_scale=trained,
            use_bias=trained,
            axis_name="replica" if kind == "of all replicas" else None,
            use_fast_variance=False,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(0.5)
        self.outer = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: Any, keys: Any) -> Any:
        hidden = nnx.relu(self.norm(self.inner(x)))
        return self.outer(_dropped(self.dropout, hidden, keys))


def _dropped(dropout: Any, hidden: Any, keys: Any) -> Any:
    return jax.vmap(lambda h, k: dropout(h, rngs=nnx.Rngs(dropout=k)))(hidden, keys)


def _step(net: Any, optimizer: Any, key: Any, x: Any, y: Any) -> Any:
    count = _ctx().all_reduce("sum", x.shape[0])
    keys = jaxdist.nn.example_keys(key, x.shape[0])

    def loss_of(net: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(net(x, keys), y)
        return jaxdist.nn.compute_average_loss(losses, global_batch_size=count)

    loss, grads = nnx.value_and_grad(loss_of)(net)
    optimizer.update(net, _ctx().all_reduce("sum", grads))
    return _ctx().all_reduce("sum", loss)


class Oracle:
    """The same training on one device, in functions of arrays."""

    def __init__(self, net: Any, kind: str, rows: tuple[int, ...]) -> None:
        self.kind = kind
        self.ends = np.cumsum((0, *rows))
        norm: Any = net.norm
        self.params: dict[str, Any] = {
            "w": net.inner.kernel[...],
            "b": net.inner.bias[...],
            "scale": norm.scale[...] if norm.use_scale else jnp.ones(HIDDEN),
            "shift": norm.bias[...] if norm.use_bias else jnp.zeros(HIDDEN),
            "v": net.outer.kernel[...],
            "c": net.outer.bias[...],
        }
        self.mean, self.var = norm.mean[...], norm.var[...]
        self.dropout = nnx.Dropout(0.5)

    def _moments(self, hidden: Any) -> list[tuple[Any, Any]]:
        """Mean and variance by which the rows of each replica are normalized."""
        parts = [hidden[a:b] for a, b in itertools.pairwise(self.ends) if b > a]
        means: list[Any] = [p.mean(0) for p in parts]
        if self.kind != "of all replicas":
            return [(m, ((p - m[None]) ** 2).mean(0)) for p, m in zip(parts, means, strict=True)]
        mean: Any = sum(means) / len(parts)
        var = sum(((p - mean[None]) ** 2).mean(0) for p in parts) / len(parts)
        return [(mean, var)] * len(parts)

    def _loss(self, params: Any, key: Any, x: Any, y: Any) -> Any:
        hidden = x @ params["w"] + params["b"][None]
        moments = self._moments(hidden)
        ranges = [(a, b) for a, b in itertools.pairwise(self.ends) if b > a]
        parts = [
            (hidden[a:b] - m[None]) * (params["scale"] / jnp.sqrt(v + EPSILON))[None]
            + params["shift"][None]
            for (a, b), (m, v) in zip(ranges, moments, strict=True)
        ]
        keys = jnp.stack([jax.random.fold_in(key, i) for i in range(len(x))])
        hidden = _dropped(self.dropout, nnx.relu(jnp.concatenate(parts)), keys)
        logits = hidden @ params["v"] + params["c"][None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        mean = sum(m for m, _ in moments) / len(moments)
        var = sum(v for _, v in moments) / len(moments)
        return losses.sum() / len(x), (mean, var)

    def step(self, key: Any, x: Any, y: Any) -> float:
        """One update; the loss before it."""
        grads_of = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (mean, var)), grads = grads_of(self.params, key, x, y)
        names = set(self.params) - (set() if self.kind == "with parameters" else {"scale", "shift"})
        self.params |= {n: self.params[n] - RATE * grads[n] for n in names}
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * mean
        self.var = MOMENTUM * self.var + (1 - MOMENTUM) * var
        return float(loss)

    def check(self, net: Net) -> None:
        """The net was trained to the same numbers."""
        norm: Any = net.norm
        pairs: list[tuple[Any, Any]] = [
            (net.inner.kernel, self.params["w"]),
            (net.inner.bias, self.params["b"]),
            (net.outer.kernel, self.params["v"]),
            (net.outer.bias, self.params["c"]),
            (norm.mean, self.mean),
            (norm.var, self.var),
        ]
        if self.kind == "with parameters":
            pairs += [(norm.scale, self.params["scale"]), (norm.bias, self.params["shift"])]
        for found, expected in pairs:
            np.testing.assert_allclose(
                np.asarray(found[...]), np.asarray(expected), rtol=1e-3, atol=1e-4
            )


def _split(x: np.ndarray, rows: tuple[int, ...]) -> PerReplica:
    ends = np.cumsum((0, *rows))
    return PerReplica([x[a:b] for a, b in itertools.pairwise(ends)])


def _state(net: Net) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(net))]


@pytest.mark.parametrize("seed", sampled(range(60), 2))
def test_training_on_any_rows_is_that_of_one_device_that_knows_them(seed: int) -> None:
    draw = random.Random(seed)
    kind, eagerly = KINDS[seed % len(KINDS)], draw.random() < 0.5
    num_replicas = draw.choice([2, 3, 4])
    has_empty = draw.random() < 0.6
    rows = tuple(
        draw.choice((0, 0, 1, 2, 3, 5)[0 if has_empty else 2 :]) for _ in range(num_replicas)
    )
    rows = (*rows[:-1], max(rows[-1], 1))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(rows), WIDTH)).astype(np.float32)
    y = rng.integers(0, CLASSES, sum(rows)).astype(np.int32)
    net = Net(kind)
    optimizer = nnx.Optimizer(net, optax.sgd(RATE), wrt=nnx.Param)
    oracle = Oracle(net, kind, rows)
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    key = jax.random.key(seed)

    def run(number: int) -> float:
        step_key = jax.random.fold_in(key, number)
        given = (net, optimizer, step_key, _split(x, rows), _split(y, rows))
        return float(strategy.run(_step, given))

    with jaxdist.config.run_eagerly(eagerly), warnings.catch_warnings():
        # Moments of all replicas count each replica the same, which is said.
        warnings.simplefilter("ignore", UnevenMeanWarning)
        if 0 in rows and kind != "without parameters":
            before = _state(net)
            with pytest.raises(NoRowsError):
                run(0)
            for old, new in zip(before, _state(net), strict=True):
                np.testing.assert_array_equal(old, new)
            return
        for number in range(2):
            loss = run(number)
            expected = oracle.step(jax.random.fold_in(key, number), x, y)
            assert loss == pytest.approx(expected, rel=1e-3)
    oracle.check(net)
