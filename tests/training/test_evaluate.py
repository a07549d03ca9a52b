"""Evaluation counts every row once."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.data import batches
from jaxdist.errors import ArgumentTypeError, ContextError, ShapeError
from jaxdist.jobs import Data, DigitsConfig
from jaxdist.jobs.digits import DigitsTask, ModelConfig
from jaxdist.training import evaluate, weighted_sums

Batch = dict[str, jax.Array]


def _strategy(replicas: int) -> jaxdist.MirroredStrategy:
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def _sums(scale: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
    return weighted_sums({"value": batch["value"] * scale}, mask)


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 16, 17, 359])
def test_the_mean_is_over_every_row_once_whatever_the_replicas(replicas: int, rows: int) -> None:
    values = np.random.default_rng(rows).normal(size=rows).astype(np.float32)
    means = evaluate(_strategy(replicas), _sums, 3.0, batches({"value": values}, 16))
    assert means["weight"] == rows
    np.testing.assert_allclose(means["value"], 3 * values.mean(dtype=np.float64), rtol=2e-5)


def test_any_dataset_of_batches_is_evaluated_and_compiled_once() -> None:
    traces: list[tuple[int, ...]] = []

    def sums(scale: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
        traces.append(mask.shape)
        return _sums(scale, batch, mask)

    def generator() -> Iterator[dict[str, np.ndarray]]:
        for rows in (5, 4, 1):
            yield {"value": np.full(rows, rows, np.float32)}

    strategy = _strategy(3)
    for dataset in (generator(), generator, list(generator())):
        means = evaluate(strategy, sums, 1.0, dataset)
        assert means == {"weight": 10.0, "value": pytest.approx((25 + 16 + 1) / 10)}
    assert traces == [(2,)]


def test_padding_that_computes_nan_is_left_out() -> None:
    def sums(_: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
        return weighted_sums({"value": 0 / batch["value"] + 1}, mask)  # 0 / 0 in padding

    strategy = jaxdist.MirroredStrategy()
    data = batches({"value": np.ones(11, np.float32)}, 8)
    assert evaluate(strategy, sums, 0.0, data) == {"weight": 11.0, "value": 1.0}


def test_rows_may_have_weights_of_their_own() -> None:
    def sums(_: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
        return weighted_sums({"value": batch["value"]}, batch["weight"] * mask)

    values, weights = np.arange(11.0), np.arange(11.0) % 3
    data = batches({"value": values, "weight": weights}, 4)
    means = evaluate(_strategy(3), sums, 0.0, data)
    assert means["weight"] == weights.sum()
    assert means["value"] == pytest.approx(np.average(values, weights=weights))


def test_boolean_and_16_bit_values_are_summed_in_32_bits() -> None:
    def sums(_: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
        value = batch["value"]
        return weighted_sums({"right": value > 0, "half": value.astype(jnp.bfloat16)}, mask)

    strategy = jaxdist.MirroredStrategy()
    data = batches({"value": np.ones(4096 * 8, np.float32)}, 4096 * 8)
    means = evaluate(strategy, sums, 0.0, data)
    assert means == {"weight": 4096.0 * 8, "right": 1.0, "half": 1.0}


def test_nothing_to_count_is_an_error() -> None:
    def sums(_: jax.Array, batch: Batch, mask: jax.Array) -> Batch:
        return weighted_sums({"value": batch["value"]}, 0.0 * mask)

    strategy = jaxdist.MirroredStrategy()
    with pytest.raises(ShapeError, match="0 batch"):
        evaluate(strategy, _sums, 1.0, [])
    with pytest.raises(ShapeError, match="total weight of 0"):
        evaluate(strategy, sums, 1.0, batches({"value": np.ones(8, np.float32)}, 8))


def test_a_batch_that_is_larger_than_the_first_is_refused() -> None:
    data = [{"value": np.ones(rows, np.float32)} for rows in (4, 9)]
    with pytest.raises(ShapeError, match="to 6 rows: it has 9"):
        evaluate(_strategy(3), _sums, 1.0, data)


# The digits


@pytest.fixture(scope="module")
def digits() -> Data:
    """Half of them held out: more than any test counts."""
    config = DigitsConfig()
    halves = dataclasses.replace(config.data, test_fraction=0.5, seed=3)
    return DigitsTask(dataclasses.replace(config, data=halves)).load()


def _one_device_means(net: Any, rows: dict[str, np.ndarray]) -> tuple[float, float]:
    """Loss and accuracy with nothing of ours: the whole data as one batch."""
    logits = np.asarray(net(jnp.asarray(rows["image"])))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows["label"])
    loss = np.asarray(losses, np.float64).mean()
    return float(loss), float((logits.argmax(-1) == rows["label"]).mean())


@pytest.mark.parametrize("held_out", [1, 32, 33, 95, 359])
def test_the_digits_have_the_same_accuracy_and_loss_on_1_3_and_8_replicas(
    digits: Data, held_out: int
) -> None:
    rows = {name: array[:held_out] for name, array in digits.held_out.items()}
    task = DigitsTask(DigitsConfig(model=ModelConfig(channels=(4,), hidden=8)))
    means: dict[int, Any] = {}
    for replicas in 1, 3, 8:
        strategy = _strategy(replicas)
        with strategy.scope():
            net = task.make_model(nnx.Rngs(0))
        means[replicas] = evaluate(strategy, task.evaluation_step, net, batches(rows, 32))
    loss, accuracy = _one_device_means(task.make_model(nnx.Rngs(0)), rows)
    for found in means.values():
        assert found["weight"] == held_out
        assert found["accuracy"] == pytest.approx(accuracy, abs=1e-12)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)


def test_weighted_sums_across_replicas_is_refused_with_the_remedy() -> None:
    with _strategy(2).scope(), pytest.raises(ContextError, match="Call it inside the function"):
        weighted_sums({"value": jnp.ones(2)}, jnp.ones(2))


def test_negative_weights_count_in_the_sums_as_in_their_total() -> None:
    values, weights = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([-1.0, 3.0, 0.0])
    sums = _strategy(1).run(lambda: weighted_sums({"x": values}, weights))
    assert {name: float(x) for name, x in sums.items()} == {"x": 5.0, "weight": 2.0}


def test_a_weight_that_is_nan_is_seen_in_the_sums() -> None:
    weights = jnp.array([jnp.nan, 1.0])
    sums = _strategy(1).run(lambda: weighted_sums({"x": jnp.ones(2)}, weights))
    assert np.isnan([float(x) for x in sums.values()]).all()


def test_complex_numbers_are_refused_since_their_imaginary_parts_would_be_lost() -> None:
    one, values = jnp.ones(2), jnp.array([1 + 5j, 2])
    with pytest.raises(ArgumentTypeError, match=r"per_row\['x'\], complex64\[2\]"):
        _strategy(1).run(lambda: weighted_sums({"x": values}, one))
    with pytest.raises(ArgumentTypeError, match=r"weight, complex64\[2\]"):
        _strategy(1).run(lambda: weighted_sums({"x": one}, values))
