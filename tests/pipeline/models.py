"""Small models for the tests of pipelines, and the ordinary loop over their layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist._pipeline import StageFns, run_pipeline

WORDS, WIDTH, LENGTH, LAYERS = 32, 16, 4, 8


def embed(e: Any, batch: Any) -> Any:
    return e["words"][batch["tokens"]]


def layer(w: Any, x: Any, keys: Any) -> Any:
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def head(h: Any, x: Any, batch: Any) -> Any:
    logits = x @ h
    own = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - own)


FNS = StageFns(embed, layer, head)


def make_parts(layers: int = LAYERS, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    stacks = {"up": draw(layers, WIDTH, 2 * WIDTH), "down": draw(layers, 2 * WIDTH, WIDTH)}
    return {"words": draw(WORDS, WIDTH)}, stacks, draw(WIDTH, WORDS)


def make_batch(micro_batches: int, rows: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Arrays `[micro_batches, rows, LENGTH]`."""
    rng = np.random.default_rng(seed)
    shape = micro_batches, rows, LENGTH
    return {k: rng.integers(0, WORDS, shape).astype(np.int32) for k in ("tokens", "labels")}


def loop_loss(fns: StageFns, parts: Any, batch: Any, keys: Any = None, reduce: str = "mean") -> Any:
    """The loss as users write it without a pipeline: no scan, no micro-batch machinery."""
    e, w, h = parts
    total: Any = 0.0
    count = len(jax.tree.leaves(batch)[0])
    for m in range(count):
        one = jax.tree.map(lambda a, m=m: a[m], batch)
        x = fns.embed(e, one)
        for n in range(len(jax.tree.leaves(w)[0])):
            of_layer = (
                None if keys is None else jax.vmap(lambda k, n=n: jax.random.fold_in(k, n))(keys[m])
            )
            x = fns.layer(jax.tree.map(lambda a, n=n: a[n], w), x, of_layer)
            if isinstance(x, tuple):
                x, loss = x
                total += loss * (1.0 if reduce == "mean" else 1 / count)
        total += fns.head(h, x, one)
    return total / count if reduce == "mean" else total


def chunked(parts: Any, chunks: int) -> Any:
    """Stacks `[chunks, layers / chunks, ...]`."""
    if chunks == 1:
        return parts
    split: Callable[[Any], Any] = lambda a: a.reshape(chunks, -1, *a.shape[1:])  # noqa: E731
    return parts[0], jax.tree.map(split, parts[1]), parts[2]


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of two trees over the largest entry of their leaf."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    ratios = [
        np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64).reshape(a.shape)))
        / max(float(np.max(np.abs(np.asarray(b, np.float64)))), 1e-30)
        for a, b in pairs
    ]
    # The `max` of Python passes over nan.
    return float(np.max(ratios))


def make_strategy(**axes: int) -> jaxdist.MirroredStrategy:
    """A strategy on this machine, such as `data=2, stage=4`, whose replicas are along "data"."""
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices("cpu")[:count]).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def place(strategy: jaxdist.MirroredStrategy, parts: Any, batch: Any, chunks: int) -> Any:
    """The layers on the stages, and the rows of each micro-batch on the replicas."""
    mesh, count = strategy.mesh, strategy.num_replicas_in_sync
    dims = [None] * (chunks > 1)

    def put(path: Any, leaf: Any) -> Any:
        spec = [*dims, "stage"]
        if "model" in mesh.axis_names:
            spec += [None, "model"] if "up" in str(path) else ["model"]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    parts = chunked(parts, chunks)
    parts = parts[0], jax.tree_util.tree_map_with_path(put, parts[1]), parts[2]

    def split(leaf: Any) -> Any:
        each = leaf.reshape(leaf.shape[0], count, -1, *leaf.shape[2:]).swapaxes(0, 1)
        return each.reshape(-1, *each.shape[2:])

    return parts, jax.device_put(jax.tree.map(split, batch), strategy.per_replica_sharding)


def on_stages(fn: Callable[..., Any], *args: Any, stages: int = 2) -> Any:
    """The result of a compiled function, on a mesh that has the axis "stage" only."""
    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:stages]
    )
    with jax.set_mesh(mesh):
        return jax.jit(fn)(*args)


def run_on_stages(
    fns: StageFns, parts: Any, batch: Any, *, stages: int = 2, **options: Any
) -> tuple[Any, Any]:
    """The loss and gradients, and the loss without gradients."""

    def run(parts: Any, batch: Any) -> Any:
        def loss_of(parts: Any) -> Any:
            return run_pipeline(fns, parts, batch, axis="stage", stages=stages, **options)

        return jax.value_and_grad(loss_of, allow_int=True)(parts), loss_of(parts)

    return on_stages(run, parts, batch, stages=stages)
