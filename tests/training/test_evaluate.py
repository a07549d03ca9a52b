"""Evaluation counts every row once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.errors import ShapeError
from jaxdist.training import evaluate, padded_batches, weighted_sums

Batch = dict[str, jax.Array]


def _sums(scale: jax.Array, batch: Batch) -> Batch:
    return weighted_sums({"value": batch["value"] * scale}, batch["weight"])


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 359])
def test_the_mean_is_over_every_row_once_whatever_the_replicas(replicas: int, rows: int) -> None:
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    values = np.random.default_rng(rows).normal(size=rows).astype(np.float32)
    means = evaluate(strategy, _sums, 3.0, padded_batches({"value": values}, 16))
    assert means["weight"] == rows
    np.testing.assert_allclose(means["value"], 3 * values.mean(dtype=np.float64), rtol=2e-5)


def test_padding_that_computes_nan_is_left_out() -> None:
    def sums(_: jax.Array, batch: Batch) -> Batch:
        return weighted_sums({"value": 0 / batch["value"] + 1}, batch["weight"])  # 0 / 0 in padding

    strategy = jaxdist.MirroredStrategy()
    batches = padded_batches({"value": np.ones(11, np.float32)}, 8)
    assert evaluate(strategy, sums, 0.0, batches) == {"weight": 11.0, "value": 1.0}


def test_boolean_and_16_bit_values_are_summed_in_32_bits() -> None:
    def sums(_: jax.Array, batch: Batch) -> Batch:
        return weighted_sums(
            {"right": batch["value"] > 0, "half": batch["value"].astype(jnp.bfloat16)},
            batch["weight"],
        )

    strategy = jaxdist.MirroredStrategy()
    batches = padded_batches({"value": np.ones(4096 * 8, np.float32)}, 4096 * 8)
    means = evaluate(strategy, sums, 0.0, batches)
    assert means == {"weight": 4096.0 * 8, "right": 1.0, "half": 1.0}


def test_nothing_to_count_is_an_error() -> None:
    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(ShapeError, match="0 batch"):
        evaluate(strategy, _sums, 1.0, [])
    empty = {"value": np.ones(8, np.float32), "weight": np.zeros(8, np.float32)}
    with pytest.raises(ShapeError, match="total weight of 0"):
        evaluate(strategy, _sums, 1.0, [empty])
