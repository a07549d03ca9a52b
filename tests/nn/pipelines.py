"""A small language model in three parts, and its training on one device and on stages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxdist
from jaxdist import nn, partition

LAYERS, WIDTH, WORDS, LENGTH, ROWS = 8, 8, 16, 4, 16
AUTO = AxisType.Auto


def strategy_of(shape: dict[str, int], kind: AxisType = AUTO) -> jaxdist.MirroredStrategy:
    sizes = tuple(shape.values())
    devices = np.asarray(jax.devices("cpu")[: int(np.prod(sizes))], dtype=object).reshape(sizes)
    mesh = Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def one_device() -> jaxdist.OneDeviceStrategy:
    return jaxdist.OneDeviceStrategy("cpu:0")


def make_params(chunks: int = 1, layers: int = LAYERS) -> dict[str, Any]:
    """Parameters, with equal numbers for any chunks."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype("float32")

    of_layers = {"up": normal(layers, WIDTH, 16), "down": normal(layers, 16, WIDTH)}
    if chunks > 1:
        of_layers = {k: w.reshape(chunks, -1, *w.shape[1:]) for k, w in of_layers.items()}
    return {"embed": normal(WORDS, WIDTH), "layers": of_layers, "head": normal(WIDTH, WORDS)}


def make_batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (rows, LENGTH)
    return {k: rng.integers(0, WORDS, shape).astype("int32") for k in ("tokens", "labels")}


def embed(e: Any, rows: Any) -> jax.Array:
    table: jax.Array = e[...]
    return table[rows["tokens"]]


def layer(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def head(h: Any, x: jax.Array, rows: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ h, rows["labels"])
    return jnp.mean(losses)


def loop_loss(params: Any, batch: Any) -> jax.Array:
    """The loss that `pipeline_loss` replaces: a loop over all layers, for all rows at once."""
    x = embed(params["embed"], batch)
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
    return head(params["head"], x, batch)


Loss = Callable[[Any, Any], jax.Array]


def pipeline(micro_batches: int, layer: Any = layer, **options: Any) -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        parts = params["embed"], params["layers"], params["head"]
        own: dict[str, Any] = {"head": head, "embed": embed, **options}
        first, last = own.pop("embed"), own.pop("head")
        return nn.pipeline_loss(
            first, layer, last, parts, batch, micro_batches=micro_batches, **own
        )

    return loss


def make_step(loss: Loss, tx: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        value, grads = jaxdist.get_replica_context().all_reduce("mean", (value, grads))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    return step


def train(
    strategy: Any, params: Any, loss: Loss, rules: Any = None, steps: int = 5, batch: Any = None
) -> tuple[list[float], Any, Any]:
    """Return the losses, the gradients of the first step, and the parameters after the last."""
    tx = optax.adam(1e-2)
    if rules is not None:
        params = partition.place(strategy, params, rules)
    state = strategy.run(tx.init, (params,))
    rows = jax.device_put(make_batch() if batch is None else batch, strategy.per_replica_sharding)
    step = make_step(loss, tx)
    losses, first = [], None
    for _ in range(steps):
        params, state, value, grads = strategy.run(step, (params, state, rows))
        losses.append(float(value))
        if first is None:
            first = to_numpy(grads)
    return losses, first, to_numpy(params)


def to_numpy(tree: Any) -> Any:
    def whole(x: Any) -> np.ndarray:
        return np.asarray(x)

    return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, jaxdist.Sharded))


def largest_difference(found: Any, expected: Any) -> float:
    """The largest difference of any leaf, relative to its largest entry; chunks are joined."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ratios = [np.abs(np.asarray(a).reshape(b.shape) - b).max() / np.abs(b).max() for a, b in pairs]
    # The `max` of Python passes over nan.
    return float(np.max(ratios))
