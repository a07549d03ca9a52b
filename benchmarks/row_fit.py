"""An epoch of `fit` costs what a hand-written loop costs.

Claim: an epoch of `fit.Model.fit` takes at most 1.05 times that of a loop by hand, which shuffles,
slices and copies batches, calls `jit(shard_map)` with donated state, and reads the losses at the
end. For a dense net, a small convolutional net, and a transformer of 10 million parameters.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import STEPS_IN_FLIGHT, P, mesh, strategy
from jaxdist import fit

ROW = "fit"
CLASSES = 10
LOSS = optax.softmax_cross_entropy_with_integer_labels


class Dense(nnx.Module):
    """Three dense layers of 256 units."""

    shape = (64,)
    batch = 256

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(i, 256, rngs=rngs) for i in (64, 256, 256)])
        self.out = nnx.Linear(256, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x)


class Convolutional(nnx.Module):
    """Two convolutions with pooling, and a dense layer."""

    shape = (16, 16, 3)
    batch = 64

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 32, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), strides=(2, 2))
        return self.out(x.reshape(x.shape[0], 4 * 4 * 32))


class Transformer(nnx.Module):
    """Six blocks of 384 features: 10.7 million parameters."""

    shape = (32, 384)
    batch = 16

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.attention = nnx.List(
            [nnx.MultiHeadAttention(6, 384, decode=False, rngs=rngs) for _ in range(6)]
        )
        self.wide = nnx.List([nnx.Linear(384, 1536, rngs=rngs) for _ in range(6)])
        self.narrow = nnx.List([nnx.Linear(1536, 384, rngs=rngs) for _ in range(6)])
        self.norms = nnx.List([nnx.LayerNorm(384, rngs=rngs) for _ in range(12)])
        self.out = nnx.Linear(384, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(6):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.narrow[i](nnx.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return self.out(x.mean(axis=1))


MODELS: dict[str, Any] = {m.__name__: m for m in (Dense, Convolutional, Transformer)}


def make_examples(kind: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and classes for this many steps."""
    rng = np.random.default_rng(0)
    count = steps * kind.batch
    x = rng.normal(size=(count, *kind.shape)).astype("float32")
    return x, rng.integers(0, CLASSES, count).astype("int32")


def with_fit(n: int, model: str) -> Loop:
    """An epoch of `fit`."""
    kind = MODELS[model]
    with strategy(n).scope():
        trained = fit.Model(kind())
        trained.compile(optax.sgd(0.01), LOSS)
    made: dict[int, Any] = {}

    def loop(steps: int) -> None:
        x, y = made.setdefault(steps, make_examples(kind, steps))
        trained.fit(x, y, kind.batch, verbose=0)

    return Loop(loop)


def by_hand(n: int, model: str) -> Loop:
    """The same epoch by hand."""
    kind = MODELS[model]
    graph, params = nnx.split(kind())
    transform = optax.sgd(0.01)
    whole, rows = NamedSharding(mesh(n), P()), NamedSharding(mesh(n), P("replica"))
    state = jax.device_put((params, transform.init(params)), whole)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, opt = state

        def total(params: Any) -> jax.Array:
            return LOSS(nnx.merge(graph, params)(x), y).sum()

        loss, grads = jax.value_and_grad(total)(params)
        loss, grads = jax.lax.psum((loss, grads), "replica")
        grads = jax.tree.map(lambda g: g / kind.batch, grads)
        updates, opt = transform.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss / kind.batch

    mapped = jax.shard_map(
        step,
        mesh=mesh(n),
        in_specs=(P(), P("replica"), P("replica")),
        out_specs=P(),
        check_vma=False,
    )
    call = jax.jit(mapped, donate_argnums=0)
    held: list[Any] = [state]
    made: dict[int, Any] = {}
    rng = np.random.default_rng(0)

    def loop(steps: int) -> None:
        x, y = made.setdefault(steps, make_examples(kind, steps))
        order = rng.permutation(len(x))
        losses: list[jax.Array] = []
        value = held[0]
        for index in range(steps):
            chosen = order[index * kind.batch : (index + 1) * kind.batch]
            batch = jax.device_put((x[chosen], y[chosen]), rows)
            value, loss = call(value, *batch)
            losses.append(loss)
            if len(losses) % STEPS_IN_FLIGHT == 0:
                jax.block_until_ready(loss)
        held[0] = value
        float(jnp.mean(jnp.stack(losses)))

    return Loop(loop)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    bursts = {"Dense": 200, "Convolutional": 60, "Transformer": 8}
    for model, steps in bursts.items():
        for n in bench.options.sizes(1, 8):
            arms = {
                "fit": arm(with_fit, n=n, model=model),
                "jit(shard_map)": arm(by_hand, n=n, model=model),
            }
            race = bench.race(f"{model} N={n}", arms, bench.options.steps(steps))
            yield race.line("fit", "jit(shard_map)", Need(1.05))
