"""The options of the language model: equal to NumPy, to each other, and on any devices."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

import jaxdist
from jaxdist import jobs
from jaxdist.errors import ConfigError
from jaxdist.jobs.topics_lm import ModelConfig, Transformer, byte_losses, generate
from jaxdist.jobs.topics_lm._attention import KERNELS, Attention, attend, rotate
from jaxdist.jobs.topics_lm._layers import Mlp

CONFIG = Path(__file__).parents[3] / "configs" / "topics_lm_data_parallel.toml"
# The shapes of the models of `configs/published`, with small numbers.
_MAXTEXT = ModelConfig(
    layers=3,
    width=16,
    heads=2,
    head_dim=12,
    hidden=32,
    mlp="gated",
    attention="chunked",
    attention_chunk=4,
    vocabulary=264,
    scan_layers=True,
    remat="layers",
)


def _tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 256, shape), jnp.int32)


def _losses_and_grads(config: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """Return losses and gradients, those of scanned layers with their names and their numbers."""
    tokens = _tokens(2, 9)

    @nnx.jit
    def run(model: Transformer) -> tuple[Any, Any]:
        return byte_losses(model, tokens), nnx.grad(lambda m: byte_losses(m, tokens).mean())(model)

    losses, grads = run(Transformer(config, rngs=nnx.Rngs(0)))
    named: dict[str, Any] = {}
    for path, leaf in nnx.to_flat_state(grads):
        name, value = "/".join(map(str, path)), np.asarray(leaf[...])
        if config.scan_layers and name.startswith("layers/"):
            rest = name.removeprefix("layers/")
            named |= {f"layers/{i}/{rest}": row for i, row in enumerate(value)}
        else:
            named[name] = value
    return losses, named


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_attention_in_chunks_is_plain_attention_and_so_are_its_gradients(length: int) -> None:
    query, key, value, wanted = jax.random.normal(jax.random.key(0), (4, 2, length, 3, 4))

    def run(how: str) -> Any:
        def total(*given: jax.Array) -> jax.Array:
            return jnp.sum(attend(*given, how=how, chunk=4) * wanted)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(query, key, value)

    plain, *others = (run(how) for how in ("plain", "chunked", *KERNELS))
    for other in others:
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_attention_in_chunks_needs_memory_that_does_not_grow_with_the_square() -> None:
    def count_bytes(how: str, length: int) -> int:
        given = [jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)] * 3

        def total(*x: jax.Array) -> jax.Array:
            return attend(*x, how=how, chunk=64).sum()

        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*given).compile()
        found: Any = compiled.memory_analysis()
        return int(found.temp_size_in_bytes)

    assert count_bytes("plain", 1024) > 3 * count_bytes("plain", 512)
    assert count_bytes("chunked", 1024) < 2.5 * count_bytes("chunked", 512)


@pytest.mark.slow
@pytest.mark.parametrize("how", KERNELS)
def test_the_kernels_of_tpus_are_plain_attention(how: str) -> None:
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 128, 1, 128))
    with pltpu.force_tpu_interpret_mode():
        found = KERNELS[how](query, key, value, scale=128**-0.5)
    plain = attend(query, key, value, how="plain", chunk=1)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-5)


def test_gradients_of_splash_attention_over_several_blocks_are_those_of_plain_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = splash_attention_kernel.make_splash_mha_single_device
    interpreted = functools.partial(make, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha_single_device", interpreted)
    given = jax.random.normal(jax.random.key(0), (3, 2, 384, 2, 128))

    def grads(attention: Callable[..., jax.Array]) -> Any:
        return jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), argnums=(0, 1, 2))(*given)

    found = grads(functools.partial(KERNELS["splash"], scale=128**-0.5))
    plain = grads(lambda *x: attend(*x, how="plain", chunk=1))
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_the_gated_mlp_is_that_of_numpy() -> None:
    config = ModelConfig(width=6, hidden=10, mlp="gated")
    init = nnx.initializers.normal(0.5)
    mlp = Mlp(config, out_init=init, linear={"use_bias": False}, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    gate = x @ np.asarray(mlp.gate.kernel[...])
    up = x @ np.asarray(mlp.up.kernel[...])
    expected = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(mlp.down.kernel[...])
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-6)


def test_a_shared_output_is_the_embedding_transposed() -> None:
    model = Transformer(ModelConfig(layers=1, output="shared"), rngs=nnx.Rngs(0))
    assert not hasattr(model, "unembed")
    seen: list[jax.Array] = []
    inner, model.norm = model.norm, lambda x: seen.append(inner(x)) or seen[-1]  # type: ignore
    logits = model(_tokens(1, 4))
    expected = np.asarray(seen[0]) @ np.asarray(model.embed.embedding[...]).T
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_heads_have_the_configured_dims() -> None:
    model = Transformer(_MAXTEXT, rngs=nnx.Rngs(0))
    attention = model.layers.attention
    assert attention.query.kernel.shape == (3, 16, 24)
    assert attention.out.kernel.shape == (3, 24, 16)
    assert model.unembed.kernel.shape == (16, 264)
    assert attention.empty_cache(2, 5)["key"].shape == (2, 5, 2, 12)


def test_scanned_layers_and_every_remat_have_the_losses_and_gradients_of_plain_layers() -> None:
    plain = dataclasses.replace(_MAXTEXT, scan_layers=False, remat="none", attention="plain")
    losses, grads = _losses_and_grads(plain)
    kinds: tuple[Any, ...] = ("none", "parameters", "products", "layers")
    others = [dataclasses.replace(_MAXTEXT, remat=kind) for kind in kinds]
    others.append(dataclasses.replace(plain, remat="products"))
    for other in others:
        found, own = _losses_and_grads(other)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        assert own.keys() == grads.keys()
        for name, grad in grads.items():
            np.testing.assert_allclose(own[name], grad, rtol=1e-3, atol=1e-6, err_msg=name)


def test_bfloat16_with_scanned_layers_is_near() -> None:
    losses, _ = _losses_and_grads(_MAXTEXT)
    half, _ = _losses_and_grads(dataclasses.replace(_MAXTEXT, dtype="bfloat16"))
    np.testing.assert_allclose(half, losses, atol=0.1)
    assert not np.array_equal(half, losses)


_SMALL = (
    "model.layers=3",
    "model.width=16",
    "model.heads=2",
    "model.head_dim=8",
    "model.hidden=32",
    "model.mlp=gated",
    "model.attention=chunked",
    "model.attention_chunk=4",
    "model.scan_layers=true",
    "model.remat=layers",
    "data.sequence_length=8",
    "data.batch_size=16",
    "strategy.whole_below=64",
)


def _train(partition: str, strategy: jaxdist.Strategy, *more: str) -> np.ndarray:
    """Return the losses of three steps."""
    job = jobs.load_job(CONFIG, [*_SMALL, f"strategy.partition={partition}", *more])
    model, optimizer = job.build(strategy)
    step, losses = type(job).train_step, []
    for number in range(3):
        rows = np.random.default_rng(number).integers(0, 256, (16, 9)).astype(np.uint8)
        batch = jaxdist.PerReplica.of_global(jax.device_put(rows, strategy.per_replica_sharding))
        losses.append(float(strategy.run(step, (model, optimizer, {"tokens": batch}))))
    return np.asarray(losses)


@pytest.mark.parametrize(
    ("partition", "shape", "axes"),
    [
        ("replicated", (8,), ("replica",)),
        ("fsdp", (8,), ("replica",)),
        ("fsdp_in_slice", (2, 4), ("slice", "replica")),
        ("fsdp_tensor_parallel", (4, 2), ("replica",)),
        ("tensor_parallel", (4, 2), ("replica",)),
    ],
)
def test_scanned_layers_train_on_8_devices_as_on_one(
    partition: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    names = (*axes, "logical")[: len(shape)]
    mesh = jax.make_mesh(shape, names)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=axes)
    split = ("model.split_residual=true", "strategy.logical_devices=2")
    more = split if len(names) > len(axes) else ()
    found = _train(partition, strategy, *more)
    expected = _train("replicated", jaxdist.OneDeviceStrategy("cpu:0"), "model.scan_layers=false")
    assert expected[0] != expected[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    if axes[0] == "slice":
        near = _train(partition, strategy, "model.sums_between_slices=bfloat16")
        np.testing.assert_allclose(near, expected, rtol=1e-3)
        assert not np.array_equal(near, found)


def test_a_sharded_scan_gathers_one_layer_at_a_time() -> None:
    strategy = jaxdist.MirroredStrategy()
    overrides = [*_SMALL, "strategy.partition=fsdp", "model.dtype=bfloat16"]
    job = jobs.load_job(CONFIG, overrides)
    found = job.lower(strategy, 2, "fsdp").compile().collectives
    inside = [c for c in found if c.kind == "all-gather" and c.in_loop]
    # The forward and the backward pass gather two norms and seven matrices, of one layer each.
    # XLA for CPUs sends bfloat16 as float32.
    sizes = [16] * 2 + [16 * 16] * 4 + [16 * 32] * 3
    assert all(c.times == 3 for c in inside)
    assert sorted(c.bytes_per_device // 4 for c in inside) == sorted(2 * sizes)


def test_text_of_scanned_layers_has_bytes_only() -> None:
    model = Transformer(_MAXTEXT, rngs=nnx.Rngs(0))
    plain = dataclasses.replace(_MAXTEXT, scan_layers=False)
    strategy = jaxdist.OneDeviceStrategy("cpu:0")
    texts = [
        generate(strategy, m, "The ", 8, context_length=16, temperature=5.0)
        for m in (model, Transformer(plain, rngs=nnx.Rngs(0)))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8


@pytest.mark.parametrize(
    ("overrides", "found", "remedy"),
    [
        (["model.head_dim=7"], "model.head_dim is 7", "Set model.head_dim to 8"),
        (
            ["model.attention=splash", "data.sequence_length=100"],
            "model.attention is 'splash', and data.sequence_length is 100",
            "Set data.sequence_length to 128",
        ),
        (
            ["model.attention=flash", "data.sequence_length=100"],
            "data.sequence_length is 100",
            "Set data.sequence_length to 128",
        ),
        (
            [
                "strategy.partition=tensor_parallel",
                "strategy.logical_devices=2",
                "model.vocabulary=257",
            ],
            "the vocabulary has 257 entries",
            "Set it to a divisor of 257, such as 1.",
        ),
        (
            [
                "strategy.partition=tensor_parallel",
                "strategy.logical_devices=2",
                "model.split_residual=true",
                "data.sequence_length=127",
            ],
            "share the 127 positions",
            "Set data.sequence_length to 128",
        ),
        (["model.vocabulary=255"], "model.vocabulary", "256"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(overrides: list[str], found: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=found) as caught:
        jobs.load_job_config(CONFIG, overrides)
    assert remedy in str(caught.value)


def test_attention_is_that_of_numpy() -> None:
    linear = {"use_bias": False}
    init = nnx.initializers.normal(0.5)
    attention = Attention(
        ModelConfig(width=8, heads=2), out_init=init, linear=linear, rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))
    found = jax.jit(lambda x: attention(x))(x)

    def projected(linear: nnx.Linear) -> np.ndarray:
        return (np.asarray(x) @ np.asarray(linear.kernel[...])).reshape(3, 5, 2, 4)

    query, key = (
        np.asarray(rotate(jnp.asarray(projected(linear)), jnp.arange(5)))
        for linear in (attention.query, attention.key)
    )
    value, seen = projected(attention.value), np.zeros((3, 5, 2, 4))
    for row, at, head in np.ndindex(3, 5, 2):
        scores = key[row, : at + 1, head] @ query[row, at, head] / 2.0  # sqrt(4 dims)
        weights = np.exp(scores - scores.max())
        seen[row, at, head] = weights @ value[row, : at + 1, head] / weights.sum()
    expected = seen.reshape(3, 5, 8) @ np.asarray(attention.out.kernel[...])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
