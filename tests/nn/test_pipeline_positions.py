"""Attention over divided positions inside of stages: the numbers of one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist import nn, partition
from tests.nn.pipelines import largest_difference, one_device, strategy_of, to_numpy

LAYERS, WIDTH, WORDS, LENGTH, ROWS, HEADS = 4, 16, 16, 16, 8, 4
BOTH = {"data": 2, "stage": 2, "positions": 2}
RULES = partition.replicated().on_stages("layers")


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / 4).astype("float32")

    return {
        "words": draw(WORDS, WIDTH),
        "places": draw(LENGTH, WIDTH),
        "layers": draw(LAYERS, WIDTH, 3 * WIDTH),
        "head": draw(WIDTH, WORDS),
    }


def make_batch() -> Any:
    text = np.random.default_rng(1).integers(0, WORDS, (ROWS, LENGTH + 1))
    return text[:, :-1], text[:, 1:]


def embed(e: Any, rows: Any) -> Any:
    words, places = e
    return words[rows[0]] + places[nn.positions(LENGTH)][None]


def head(h: Any, x: Any, rows: Any) -> Any:
    logits = jax.nn.log_softmax(x @ h)
    return -jnp.take_along_axis(logits, rows[1][..., None], -1).mean()


def make_layer(**options: Any) -> Any:
    def layer(w: Any, x: Any) -> Any:
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], 3 * HEADS, -1), 3, 2)
        return x + nn.attention(q, k, v, causal=True, **options).reshape(x.shape)

    return layer


def run(strategy: Any, layer: Any, order: str) -> Any:
    """The loss and the gradients of a step."""

    def loss_fn(params: Any, rows: Any) -> Any:
        parts = (params["words"], params["places"]), params["layers"], params["head"]
        return nn.pipeline_loss(embed, layer, head, parts, rows, micro_batches=2)

    def step(params: Any, rows: Any) -> Any:
        rows = nn.split_positions(rows, order=order)
        found = jax.value_and_grad(loss_fn)(params, rows)
        return jaxdist.get_replica_context().all_reduce("mean", found)

    params = partition.place(strategy, make_params(), RULES)
    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    loss, grads = strategy.run(step, (params, rows))
    return float(loss), to_numpy(grads)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", ["ulysses", "gather", "ring"])
def test_attention_in_stages_is_that_of_one_device(kind: str, order: str) -> None:
    loss, grads = run(strategy_of(BOTH), make_layer(kind=kind), order)
    wanted, of_one = run(one_device(), make_layer(), order)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert largest_difference(grads, of_one) <= 2e-6


def test_a_permute_of_your_own_over_another_axis_works_in_stages() -> None:
    def turned(x: Any) -> Any:
        return jax.lax.ppermute(x, "positions", [(0, 1), (1, 0)])

    def make(turn: Any) -> Any:
        return lambda w, x: x + jnp.tanh(turn(x) @ w[:, :WIDTH])

    def divided(x: Any) -> Any:
        spec = P(None, "positions")
        return jax.shard_map(turned, in_specs=spec, out_specs=spec)(x)

    loss, grads = run(strategy_of(BOTH), make(divided), "contiguous")
    halves_changed = make(lambda x: jnp.roll(x, LENGTH // 2, axis=1))
    wanted, of_one = run(one_device(), halves_changed, "contiguous")
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert largest_difference(grads, of_one) <= 2e-6


def test_the_same_ring_without_stages_is_right() -> None:
    strategy = strategy_of({"data": 2, "positions": 4})
    loss, _ = run(strategy, make_layer(kind="ring"), "zigzag")
    np.testing.assert_allclose(loss, run(one_device(), make_layer(), "zigzag")[0], rtol=1e-6)
