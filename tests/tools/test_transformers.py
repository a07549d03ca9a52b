"""Models of transformers in NNX: the weights that go over and back are the same bits."""

import importlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist import partition, training
from jaxdist.errors import CheckpointError

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
safetensors_torch: Any = importlib.import_module("safetensors.torch")

WIDTH, HEADS, KEYS, SIZE, LAYERS, TOKENS, LENGTH = 32, 4, 2, 8, 3, 96, 12


class Layer(nnx.Module):
    """A layer of Llama: grouped heads, rotary positions, a gated MLP."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def project(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.norm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.query = nnx.LinearGeneral(WIDTH, (HEADS, SIZE), use_bias=False, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, (KEYS, SIZE), use_bias=False, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, (KEYS, SIZE), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, SIZE), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.gate, self.up = project(WIDTH, 64), project(WIDTH, 64)
        self.down = project(64, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        query, key = rotate(self.query(y)), rotate(self.key(y))
        found = jax.nn.dot_product_attention(query, key, self.value(y), is_causal=True)
        x = x + self.out(found)
        y = self.norm_2(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


def rotate(x: jax.Array) -> jax.Array:
    angles = jnp.outer(jnp.arange(x.shape[1]), 10000.0 ** (-jnp.arange(0, SIZE, 2) / SIZE))
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(WIDTH, TOKENS, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_mapping() -> dict[str, Any]:
    weight = training.Weight
    mapping: dict[str, Any] = {
        "embed/embedding": "model.embed_tokens.weight",
        "/norm/scale": "model.norm.weight",
        "head/kernel": weight("lm_head.weight").T,
        "layers/*/norm/scale": "model.layers.*.input_layernorm.weight",
        "layers/*/norm_2/scale": "model.layers.*.post_attention_layernorm.weight",
        "layers/*/{gate,up,down}/kernel": weight("model.layers.*.mlp.*_proj.weight").T,
    }
    for name, short, heads in (("query", "q", HEADS), ("key", "k", KEYS), ("value", "v", KEYS)):
        source = weight(f"model.layers.*.self_attn.{short}_proj.weight")
        mapping[f"layers/*/{name}/kernel"] = source.T.reshape(WIDTH, heads, SIZE)
    out = weight("model.layers.*.self_attn.o_proj.weight")
    mapping["layers/*/out/kernel"] = out.T.reshape(HEADS, SIZE, WIDTH)
    return mapping


@pytest.fixture(scope="module")
def original() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        rms_norm_eps=1e-6,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _mesh_strategy() -> jaxdist.MirroredStrategy:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


LAYOUTS: dict[str, Any] = {
    "whole": (jaxdist.MirroredStrategy, None),
    "pieces": (
        jaxdist.MirroredStrategy,
        partition.Rules([], otherwise=partition.Shard(pad=True)),
    ),
    "tensor_parallel": (
        _mesh_strategy,
        partition.Rules(
            [
                ("{query,key,value}/kernel", partition.Split(1)),
                ("out/kernel", partition.Split(0)),
                ("{gate,up}/kernel", partition.Split(1)),
                ("down/kernel", partition.Split(0)),
            ],
            otherwise=partition.Replicate(),
        ),
    ),
    "both": (
        _mesh_strategy,
        partition.Rules(
            [
                ("{gate,up}/kernel", partition.Shard(0, split=1, pad=True)),
                ("down/kernel", partition.Shard(1, split=0, pad=True)),
            ],
            otherwise=partition.Shard(pad=True),
        ),
    ),
}


@pytest.mark.parametrize(("make", "rules"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("most", ["10MB", "20KB"])
def test_a_llama_gives_the_outputs_of_torch_on_every_layout(
    make: Any, rules: Any, most: str, original: Any, tmp_path: pathlib.Path
) -> None:
    original.save_pretrained(tmp_path / "a", max_shard_size=most)
    index = tmp_path / "a" / "model.safetensors.index.json"
    assert index.exists() == (most == "20KB")
    strategy = make()
    model = Llama(nnx.Rngs(1))
    if rules is not None:
        partition.place(strategy, model, rules)
    training.load_weights(model, tmp_path / "a", make_mapping())
    tokens = np.random.default_rng(0).integers(0, TOKENS, (3, LENGTH))
    with torch.no_grad():
        wanted = original(torch.from_numpy(tokens)).logits.numpy()
    found = strategy.run(lambda model, x: model(x), (model, tokens))
    found = np.asarray(strategy.experimental_local_results(found)[0])
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()

    # Back to torch, and from torch to another model: equal bits.
    training.export_weights(model, tmp_path / "b", make_mapping(), like=tmp_path / "a")
    original.config.save_pretrained(tmp_path / "b")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
    before, after = original.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again.save_pretrained(tmp_path / "c")
    other = Llama(nnx.Rngs(2))
    if rules is not None:
        partition.place(strategy, other, rules)
    training.load_weights(other, tmp_path / "c", make_mapping())
    states = (partition.gather(nnx.state(x)) for x in (model, other))
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_a_model_of_jaxdist_goes_through_torch_and_back_in_pieces(tmp_path: pathlib.Path) -> None:
    strategy = jaxdist.MirroredStrategy()
    rules = partition.Rules([], otherwise=partition.Shard(pad=True))
    first, second = Llama(nnx.Rngs(1)), Llama(nnx.Rngs(2))
    for model in (first, second):
        partition.place(strategy, model, rules)
    training.export_weights(first, tmp_path / "a.safetensors")
    tensors = safetensors_torch.load_file(tmp_path / "a.safetensors")
    safetensors_torch.save_file(tensors, tmp_path / "b.safetensors")
    training.load_weights(second, tmp_path / "b.safetensors")
    states = (partition.gather(nnx.state(x)) for x in (first, second))
    for one, two in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_weights_of_torch_in_bfloat16_are_rounded_once(
    original: Any, tmp_path: pathlib.Path
) -> None:
    half = original.to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    model = Llama(nnx.Rngs(1))
    training.load_weights(model, tmp_path, make_mapping())
    found = np.asarray(model.head.kernel[...])
    np.testing.assert_array_equal(found, half.lm_head.weight.detach().float().numpy().T)
    original.to(torch.float32)


def test_a_forgotten_transpose_is_named(original: Any, tmp_path: pathlib.Path) -> None:
    original.save_pretrained(tmp_path)
    mapping = make_mapping() | {"head/kernel": "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"Weight\('lm_head.weight'\) is \[96, 32\]: add \.T"):
        training.load_weights(Llama(nnx.Rngs(0)), tmp_path, mapping)
