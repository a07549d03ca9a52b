"""Attention by its definition, and strategies whose mesh has an axis of positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxdist

KINDS = ("ulysses", "gather", "ring")
ORDERS = ("contiguous", "zigzag")


def by_definition(
    q: Any, k: Any, v: Any, *, causal: bool = False, segments: Any = None, scale: Any = None
) -> jax.Array:
    """Softmax over whole rows of scores."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    mask = jnp.ones((1, q.shape[1], q.shape[1]), bool)
    if causal:
        mask = mask & jnp.tril(mask[0])[None]
    if segments is not None:
        mask = mask & (segments[:, :, None] == segments[:, None])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def draw(
    seed: int, rows: int, positions: int, heads: int, kv_heads: int, d: int
) -> tuple[np.ndarray, ...]:
    """q, k, v, weights of a loss, and segments, some of which occur twice."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, positions, n, d) for n in (heads, kv_heads, kv_heads, heads)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    segments = np.sort(rng.integers(0, 4, size=(rows, positions)), axis=1)
    segments[:, : positions // 5] = 3
    return *arrays, segments.astype(np.int32)


def on_mesh(
    shape: tuple[int, ...],
    names: tuple[str, ...] = ("data", "positions"),
    explicit: bool = False,
) -> jaxdist.MirroredStrategy:
    """A strategy with replicas over "data"."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def rows_of(strategy: jaxdist.Strategy, *arrays: Any) -> Any:
    """Arrays whose rows are divided over the replicas."""
    return jax.device_put(arrays, strategy.per_replica_sharding)


def whole(strategy: jaxdist.Strategy, value: Any) -> np.ndarray:
    """The rows of all replicas."""
    return np.concatenate([np.asarray(x) for x in strategy.experimental_local_results(value)])


def distance(found: Any, expected: Any) -> float:
    """The largest difference over the largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ratios = [
        np.abs(np.asarray(a, "f8") - np.asarray(b, "f8")).max() / np.abs(b).max() for a, b in pairs
    ]
    # The `max` of Python passes over nan.
    return float(np.max(ratios))
