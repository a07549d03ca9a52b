"""Stages whose devices exchange values over another axis of the mesh, inside of a layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import nn, partition
from jaxdist.partition import Replicate, Rules, Split, Stage
from tests.nn.attention import by_definition
from tests.nn.pipelines import WORDS, embed, head, largest_difference, strategy_of, to_numpy

LAYERS, WIDTH, HEADS, LENGTH = 4, 16, 4, 16


def make_params() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / 4).astype("float32")

    layers = {"qkv": draw(LAYERS, WIDTH, 3 * WIDTH), "out": draw(LAYERS, WIDTH, WIDTH)}
    return {"embed": draw(WORDS, WIDTH), "layers": layers, "head": draw(WIDTH, WORDS)}


def make_batch() -> Any:
    rng = np.random.default_rng(1)
    shape = (8, LENGTH)
    return {k: rng.integers(0, WORDS, shape).astype("int32") for k in ("tokens", "labels")}


def layer_of(attend: Any) -> Any:
    """A layer whose queries, keys and values are slices of one product."""

    def layer(w: Any, x: Any) -> Any:
        heads = (a.reshape(*a.shape[:2], HEADS, -1) for a in jnp.split(x @ w["qkv"], 3, axis=-1))
        return x + attend(*heads).reshape(x.shape) @ w["out"]

    return layer


def run(shape: dict[str, int], layer: Any, rules: Any, last: Any = head, **options: Any) -> Any:
    """The loss and the gradients of a pipeline."""
    strategy = strategy_of(shape)

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            parts = params["embed"], params["layers"], params["head"]
            rows = nn.split_positions(batch) if "positions" in shape else batch
            return nn.pipeline_loss(embed, layer, last, parts, rows, micro_batches=4, **options)

        found = jax.value_and_grad(loss)(params)
        return jaxdist.get_replica_context().all_reduce("mean", found)

    rows = jax.device_put(make_batch(), strategy.per_replica_sharding)
    return to_numpy(strategy.run(step, (partition.place(strategy, make_params(), rules), rows)))


def run_by_definition(is_causal: bool) -> Any:
    def loss(params: Any) -> Any:
        batch = make_batch()
        layer = layer_of(lambda *qkv: by_definition(*qkv, causal=is_causal))
        x = embed(params["embed"], batch)
        for n in range(LAYERS):
            x = layer(jax.tree.map(lambda a, n=n: a[n], params["layers"]), x)
        return head(params["head"], x, batch)

    return to_numpy(jax.value_and_grad(loss)(jax.tree.map(jnp.asarray, make_params())))


SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("1f1b", "ring"), ("zero_bubble", "ring"), ("1f1b", "ulysses"), ("zero_bubble", "gather")],
)
def test_each_kind_of_attention_works_inside_of_stages(schedule: str, kind: str) -> None:
    layer = layer_of(lambda *qkv: nn.attention(*qkv, kind=kind, causal=True, block=4))
    shape = {"data": 2, "stage": 2, "positions": 2}
    rules = Rules([("layers/**", Stage())], otherwise=Replicate())
    loss, grads = run(shape, layer, rules, schedule=schedule)
    expected, first = run_by_definition(is_causal=True)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert largest_difference(grads, first) <= 2e-6


@SCHEDULES
def test_slices_of_a_split_product_are_exchanged_inside_of_stages(schedule: str) -> None:
    """XLA moves the parts of the product by permutes, which on CPU wait for all devices."""
    layer = layer_of(lambda *qkv: by_definition(*qkv))
    rules = Rules(
        [
            ("layers/qkv", Stage(Split(1, axis="model"))),
            ("layers/out", Stage(Split(0, axis="model"))),
        ],
        otherwise=Replicate(),
    )
    loss, grads = run({"data": 2, "stage": 2, "model": 2}, layer, rules, schedule=schedule)
    expected, first = run_by_definition(is_causal=False)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert largest_difference(grads, first) <= 2e-6


@SCHEDULES
def test_functions_may_permute_over_the_replicas(schedule: str) -> None:
    def swap(x: Any) -> Any:
        return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

    rules = Rules([("layers/**", Stage())], otherwise=Replicate())
    layer = layer_of(lambda *qkv: by_definition(*qkv))

    def swapped(w: Any, x: Any) -> Any:
        return swap(layer(w, swap(x)))

    loss, grads = run({"data": 2, "stage": 4}, swapped, rules, schedule=schedule)
    expected, first = run_by_definition(is_causal=False)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert largest_difference(grads, first) <= 2e-6
