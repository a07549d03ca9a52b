"""The transformer: causal, the same byte by byte as at once, and equal to NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.jobs.topics_lm import ModelConfig, Transformer, byte_losses, generate

_SMALL = ModelConfig(layers=2, width=16, heads=2, hidden=32)


def _model(config: ModelConfig = _SMALL) -> Transformer:
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def drawn(x: jax.ShapeDtypeStruct) -> jax.Array:
        # Larger than at the start of training, so that the compared values are not nearly zero.
        return jnp.asarray(rng.normal(0 if x.ndim > 1 else 1, 0.2, x.shape), x.dtype)

    nnx.update(model, jax.tree.map(drawn, nnx.state(model)))
    return model


def _tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, shape), jnp.int32)


def test_parameters_have_the_names_that_partition_rules_are_written_for() -> None:
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(_model()))}
    layer = [f"attention/{n}/kernel" for n in ("query", "key", "value", "out")]
    layer += ["mlp/up/kernel", "mlp/down/kernel", "attention_norm/scale", "mlp_norm/scale"]
    layers = {f"layers/{i}/{name}" for i in range(2) for name in layer}
    assert paths == {"embed/embedding", "norm/scale", "unembed/kernel", *layers}


def test_losses_are_those_of_optax_and_no_logit_sees_a_later_byte() -> None:
    model, tokens = _model(), _tokens(2, 9)
    run, losses = jax.jit(lambda x: model(x)), jax.jit(lambda x: byte_losses(model, x))
    logits = run(tokens[:, :-1])
    assert logits.dtype == jnp.float32
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    np.testing.assert_allclose(losses(tokens), expected, rtol=1e-4)
    for at in 1, 4, 8:
        other = tokens.at[:, at].add(1) % 256
        changed = np.any(np.asarray(run(other[:, :-1]) != logits), axis=(0, 2))
        assert not changed[:at].any()
        assert changed[at:].all()


def test_byte_by_byte_gives_the_logits_of_all_at_once_and_the_ring_forgets_the_oldest() -> None:
    model, tokens = _model(dataclasses.replace(_SMALL, layers=1)), _tokens(2, 12)
    step = jax.jit(lambda token, caches, at: model.step(token, caches, at))
    caches, found = model.empty_caches(2, 8), []
    for at in range(12):
        logits, caches = step(tokens[:, at], caches, at)
        found.append(logits)
    at_once = model(tokens[:, :8])
    np.testing.assert_allclose(jnp.stack(found[:8], 1), at_once, rtol=1e-3, atol=1e-4)
    # With one layer, the cache contains nothing of the dropped position.
    for at in range(8, 12):
        window = model(tokens[:, at - 7 : at + 1])[:, -1]
        np.testing.assert_allclose(found[at], window, rtol=1e-3, atol=1e-4)


def test_greedy_text_is_that_of_the_likeliest_byte_each_time_on_any_number_of_devices() -> None:
    model = _model()
    text = list(b"The ")
    full = jax.jit(lambda tokens: model(tokens))
    for _ in range(12):
        padded = jnp.asarray(text + [0] * (16 - len(text)))[None]
        text.append(int(full(padded)[0, len(text) - 1].argmax()))
    for strategy in (jaxdist.OneDeviceStrategy("cpu:0"), jaxdist.MirroredStrategy()):
        found = generate(strategy, model, "The ", 12, context_length=16, temperature=0.0)
        assert found == bytes(text[4:])
        draws = [
            generate(strategy, model, "The ", 12, context_length=16, temperature=5.0, seed=seed)
            for seed in (1, 1, 2)
        ]
        assert draws[0] == draws[1] != draws[2]
        assert generate(strategy, model, "The ", 0, context_length=16) == b""


def test_remat_changes_no_gradient_and_bfloat16_is_near() -> None:
    tokens = _tokens(2, 9)

    @nnx.jit
    def losses_and_grads(
        plain: Transformer, remat: Transformer, half: Transformer
    ) -> tuple[list[jax.Array], list[nnx.State]]:
        def mean_loss(model: Transformer) -> jax.Array:
            return byte_losses(model, tokens).mean()

        models = (plain, remat, half)
        return [byte_losses(m, tokens) for m in models], [nnx.grad(mean_loss)(m) for m in models]

    changes: tuple[dict[str, Any], ...] = ({}, {"remat": "layers"}, {"dtype": "bfloat16"})
    models = [_model(dataclasses.replace(_SMALL, layers=1, **change)) for change in changes]
    (plain, _, half), grads = losses_and_grads(*models)
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, plain, atol=0.3)
    assert not np.array_equal(half, plain)


def test_dropout_drops_its_share_and_nothing_without_keys() -> None:
    dropout = 0.25
    layer = _model(dataclasses.replace(_SMALL, dropout=dropout)).layers[0]
    keys = jax.random.split(jax.random.key(0), 50)
    x = jnp.ones((50, 8, 16))
    dropped = np.asarray(layer._drop_out(x, keys, 0))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / (1 - dropout))}
    assert (dropped == 0).mean() == pytest.approx(dropout, abs=0.02)
    np.testing.assert_array_equal(layer._drop_out(x, None, 0), x)
