"""Narrow dtypes where JAX promotes none by itself: `jax_numpy_dtype_promotion="strict"`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxdist
from jaxdist import nn, partition

NARROW = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def _over(axis: str, size: int) -> jaxdist.MirroredStrategy:
    mesh = jax.make_mesh((8 // size, size), ("data", axis), (AxisType.Auto,) * 2)
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


def _run(strategy: Any, step: Callable[..., Any], whole: Any, rows: Any) -> None:
    """Run a step, and compare its loss and gradients with those of one device."""
    placed, rules = whole
    params = placed if rules is None else partition.place(strategy, placed, rules)
    found = strategy.run(
        lambda p, x: jaxdist.get_replica_context().all_reduce("mean", step(p, x)),
        (params, jax.device_put(rows, strategy.per_replica_sharding)),
    )
    wanted = jax.tree.leaves(step(placed, rows))
    for a, b in zip(jax.tree.leaves(partition.gather(found)), wanted, strict=True):
        np.testing.assert_allclose(_wide(a), _wide(b), atol=0.05 * np.abs(_wide(b)).max())


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


@NARROW
@pytest.mark.parametrize("kind", ["gather", "ulysses", "ring"])
def test_attention_takes_narrow_arrays(dtype: Any, kind: str) -> None:
    rows = np.asarray(jax.random.normal(jax.random.key(0), (4, 16, 2, 8), jnp.float32)).astype(
        dtype
    )
    scale = np.ones((1, 1, 1, 8), dtype)

    def step(scale: Any, rows: Any) -> Any:
        def loss(scale: Any) -> Any:
            x = nn.split_positions(rows * scale, order="zigzag")
            y = nn.attention(x, x, x, causal=True, kind=kind, order="zigzag")
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)(scale)

    _run(_over("position", 2), step, (scale, None), rows)


@NARROW
def test_experts_take_narrow_arrays(dtype: Any) -> None:
    tokens = np.asarray(jax.random.normal(jax.random.key(0), (8, 4, 8), jnp.float32)).astype(dtype)
    params = {
        "router": np.asarray(jax.random.normal(jax.random.key(1), (8, 4), jnp.float32)),
        "experts": np.full((4, 8, 8), 0.1, dtype),
    }

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            y, (balance, _) = nn.experts(
                lambda w, rows: jnp.tanh(rows @ w),
                params["router"],
                params["experts"],
                tokens,
                top_k=1,
            )
            return jnp.mean(y.astype(jnp.float32) ** 2) + balance

        return jax.value_and_grad(loss)(params)

    rules = [("experts", partition.Split(0)), ("router", partition.Replicate())]
    _run(_over("expert", 2), step, (params, rules), tokens)


@NARROW
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("has_words", [False, True], ids=["own head", "vocabulary head"])
def test_stages_take_narrow_arrays(dtype: Any, schedule: str, has_words: bool) -> None:
    words = np.random.default_rng(0).integers(0, 32, (16, 4))
    params = {
        "embed": np.random.default_rng(1).normal(size=(32, 8)).astype(dtype),
        "layers": np.full((4, 8, 8), 0.1, dtype),
        "head": np.random.default_rng(2).normal(size=(8, 32)).astype(dtype),
    }

    def mean_square(h: Any, x: Any, _: Any) -> Any:
        return jnp.mean((x @ h).astype(jnp.float32) ** 2)

    def step(params: Any, words: Any) -> Any:
        def loss(params: Any) -> Any:
            return nn.pipeline_loss(
                lambda table, rows: table[rows],
                lambda w, x: x + jnp.tanh(x @ w),
                nn.vocabulary_head(lambda rows: rows) if has_words else mean_square,
                (params["embed"], params["layers"], params["head"]),
                words,
                micro_batches=4,
                schedule=schedule,
            )

        return jax.value_and_grad(loss)(params)

    rules = [("layers", partition.Stage()), ("{embed,head}", partition.Replicate())]
    _run(_over("stage", 2), step, (params, rules), words)
