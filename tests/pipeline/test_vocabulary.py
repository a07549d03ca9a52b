"""The cross-entropy of a vocabulary, whole and split over the stages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxdist import errors
from jaxdist._pipeline import StageFns, run_plain, vocabulary_loss
from tests.pipeline.models import (
    WIDTH,
    chunked,
    difference,
    embed,
    layer,
    make_batch,
    make_parts,
    run_on_stages,
)


def _draw(words: int = 32, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    h, x = rng.normal(size=(8, words)), rng.normal(size=(3, 5, 8))
    return jnp.asarray(h, dtype), jnp.asarray(x, dtype), jnp.asarray(rng.integers(0, words, (3, 5)))


def test_it_is_the_cross_entropy_of_optax() -> None:
    h, x, labels = _draw()

    def theirs(h: Any, x: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ h, labels).mean()

    found = jax.value_and_grad(lambda h, x: vocabulary_loss(h, x, labels), (0, 1))(h, x)
    assert difference(found, jax.value_and_grad(theirs, (0, 1))(h, x)) < 1e-6


def test_weights_leave_tokens_out_even_those_without_a_word() -> None:
    h, x, labels = _draw()
    weights = jnp.zeros((3, 5)).at[1, 2].set(0.5)
    found = vocabulary_loss(h, x, jnp.where(weights > 0, labels, -100), weights)
    one = vocabulary_loss(h, x[1:2, 2:3], labels[1:2, 2:3])
    np.testing.assert_allclose(found, 0.5 * one, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_large_logits_of_narrow_floats_stay_finite(dtype: Any) -> None:
    h, x, labels = _draw(dtype=dtype)
    loss, grads = jax.value_and_grad(lambda h: vocabulary_loss(h, 100 * x, labels))(100 * h)
    assert loss.dtype == jnp.float32
    assert grads.dtype == dtype
    assert bool(jnp.isfinite(loss))
    assert bool(jnp.all(jnp.isfinite(grads)))


def _norm(scale: Any, x: Any) -> Any:
    mean = jnp.mean(x * x, -1, keepdims=True)
    return scale[None, None] * x / jnp.sqrt(mean + 1e-6)


def _head(h: Any, x: Any, batch: Any) -> Any:
    """With a norm before it and a loss beside it, which all stages compute."""
    loss = vocabulary_loss(h["matrix"], _norm(h["scale"], x), batch["labels"])
    return loss + 0.1 * jnp.sum(h["scale"] ** 2)


SPECS = {"matrix": PartitionSpec(None, "stage"), "scale": PartitionSpec()}


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("zero_bubble", 2), ("zero_bubble", 1), ("gpipe", 1)]
)
def test_split_over_stages_it_has_the_gradients_of_one_device(schedule: str, chunks: int) -> None:
    embedding, layers, matrix = make_parts(4)
    parts = embedding, layers, {"matrix": matrix, "scale": np.linspace(0.5, 1.5, WIDTH)}
    fns, batch = StageFns(embed, layer, _head), make_batch(4, 2)
    wanted = jax.value_and_grad(lambda p: run_plain(fns, p, batch))(parts)
    found, alone = run_on_stages(
        fns, chunked(parts, chunks), batch, schedule=schedule, chunks=chunks, head_specs=SPECS
    )
    assert difference(found, wanted) < 1e-6
    assert difference(alone, wanted[0]) < 1e-6


def test_words_that_the_stages_cannot_divide_are_refused() -> None:
    embedding, layers, matrix = make_parts(4)
    parts = embedding, layers, {"matrix": matrix[:, :31], "scale": np.ones(WIDTH)}
    with pytest.raises(errors.ShapeError, match=r"\[16, 31\].*\n\n.*\n\nPad this dim to 32"):
        run_on_stages(StageFns(embed, layer, _head), parts, make_batch(4, 2), head_specs=SPECS)


def test_wrong_shapes_and_labels_are_refused() -> None:
    h, x, labels = _draw()
    with pytest.raises(errors.ShapeError, match=r"labels \[3, 4\]"):
        vocabulary_loss(h, x, labels[:, :4])
    with pytest.raises(errors.ShapeError, match=r"weights \[5\] for labels \[3, 5\]"):
        vocabulary_loss(h, x, labels, jnp.ones(5))
    with pytest.raises(errors.ArgumentTypeError, match="labels of float32"):
        vocabulary_loss(h, x, labels.astype(jnp.float32))


def test_a_label_that_is_no_word_gives_nan_unless_it_has_no_weight() -> None:
    h, x, labels = _draw()
    weights = jnp.ones(labels.shape).at[0, 0].set(0.0)
    for number in (-100, h.shape[1]):
        wrong = labels.at[0, 0].set(number)
        assert jnp.isnan(vocabulary_loss(h, x, wrong))
        loss, grads = jax.value_and_grad(lambda h, w=wrong: vocabulary_loss(h, x, w, weights))(h)
        expected = jax.value_and_grad(lambda h: vocabulary_loss(h, x, labels, weights))(h)
        np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
        np.testing.assert_allclose(grads, expected[1], atol=1e-6)
        of_weights = jax.grad(lambda w, wrong=wrong: vocabulary_loss(h, x, wrong, w))(weights)
        assert of_weights[0, 0] == 0
        assert bool(jnp.all(jnp.isfinite(of_weights)))
