"""Attention whose positions lie over the devices of a replica: the numbers of one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import nn, partition
from tests.nn.attention import (
    KINDS,
    ORDERS,
    by_definition,
    distance,
    draw,
    on_mesh,
    rows_of,
    whole,
)
from tests.tables import examples

MESHES: dict[str, tuple[Any, ...]] = {
    "1x8": ((1, 8),),
    "2x4": ((2, 4),),
    "4x2": ((4, 2),),
    "2x4, Explicit": ((2, 4), ("data", "positions"), True),
    "positions first": ((4, 2), ("positions", "data")),
    "2x2x2, model last": ((2, 2, 2), ("data", "positions", "model")),
    "2x2x2, model first": ((2, 2, 2), ("data", "model", "positions"), True),
}


def _step(
    q: Any,
    k: Any,
    v: Any,
    weights: Any,
    segments: Any,
    kind: str,
    order: str,
    causal: bool,
    has_segments: bool,
    block: int,
) -> Any:
    q, k, v, weights, segments = nn.split_positions((q, k, v, weights, segments), order=order)

    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        ids = segments if has_segments else None
        out = nn.attention(q, k, v, kind=kind, causal=causal, segment_ids=ids, block=block)
        return (out * weights).sum(), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, grads, nn.positions(q.shape[1])


def _in_order(strategy: Any, tree: Any, numbers: Any) -> Any:
    """Arrays of all replicas with their positions as they were."""
    places = np.argsort(np.asarray(numbers))
    return jax.tree.map(
        lambda x: whole(strategy, x)[:, places],
        tree,
        is_leaf=lambda x: isinstance(x, jaxdist.PerReplica),
    )


def _differ(strategy: Any, arrays: Any, **how: Any) -> float:
    given = rows_of(strategy, *arrays)
    how = {"causal": True, "has_segments": False, "block": 8, **how}
    out, grads, numbers = strategy.run(functools.partial(_step, **how), given)
    found = _in_order(strategy, (out, grads), numbers)
    q, k, v, weights, segments = arrays

    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        ids = segments if how["has_segments"] else None
        out = by_definition(q, k, v, causal=how["causal"], segments=ids)
        return (out * weights).sum(), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return distance(found, (out, grads))


@pytest.mark.parametrize(
    ("mesh", "order"),
    [*((mesh, "zigzag") for mesh in MESHES), *((mesh, "contiguous") for mesh in ("1x8", "4x2"))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_one_device(kind: str, order: str, mesh: str) -> None:
    strategy = on_mesh(*MESHES[mesh])
    arrays = draw(0, 4, 48, 8, 4, 8)
    assert _differ(strategy, arrays, kind=kind, order=order, has_segments=True) < 2e-6


@settings(max_examples=examples(8))
@given(
    seed=st.integers(0, 9),
    parts=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(KINDS),
    order=st.sampled_from(ORDERS),
    causal=st.booleans(),
    has_segments=st.booleans(),
    block=st.sampled_from([1, 3, 512]),
)
def test_any_shape_and_mask_gives_the_numbers_of_one_device(
    seed: int,
    parts: int,
    kv_heads: int,
    group: int,
    kind: str,
    order: str,
    causal: bool,
    has_segments: bool,
    block: int,
) -> None:
    strategy = on_mesh((2, 4))
    group = group if kv_heads * group % 4 == 0 or kind != "ulysses" else 4
    arrays = draw(seed, 2, 8 * parts, kv_heads * group, kv_heads, 3)
    how = {"causal": causal, "has_segments": has_segments, "block": block}
    assert _differ(strategy, arrays, kind=kind, order=order, **how) < 3e-6


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6, 12])
def test_ulysses_repeats_heads_of_keys_as_often_as_devices_need(kv_heads: int) -> None:
    strategy = on_mesh((2, 4))
    assert _differ(strategy, draw(1, 2, 16, 12, kv_heads, 4), kind="ulysses", order="zigzag") < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_differs_by_roundings_alone(kind: str) -> None:
    strategy = on_mesh((1, 8))
    *arrays, segments = draw(2, 1, 64, 8, 8, 16)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    step = functools.partial(
        _step, kind=kind, order="zigzag", causal=True, has_segments=True, block=8
    )
    out, grads, numbers = strategy.run(step, rows_of(strategy, *narrow, segments))
    assert {str(x.dtype) for x in (out, *grads)} == {"bfloat16"}
    out, grads = _in_order(strategy, (out, grads), numbers)
    wide = [x.astype(jnp.float32) for x in narrow]
    expected = by_definition(*wide[:3], causal=True, segments=segments)
    assert distance(out.astype("f4"), expected) < 2**-7


@pytest.mark.parametrize("kind", KINDS)
def test_two_axes_divide_two_sequences(kind: str) -> None:
    strategy = on_mesh((2, 2, 2), ("data", "positions", "frames"))
    words, frames = draw(3, 2, 16, 4, 4, 4), draw(4, 2, 24, 4, 2, 4)

    def step(words: Any, frames: Any) -> Any:
        words = nn.split_positions(words)
        frames = nn.split_positions(frames, axis="frames", order="contiguous")
        of_words = nn.attention(*words, causal=True, kind=kind)
        of_frames = nn.attention(*frames, causal=True, kind=kind, axis="frames")
        return of_words, of_frames, nn.positions(16), nn.positions(24, axis="frames")

    given = rows_of(strategy, words[:3], frames[:3])
    *found, of_words, of_frames = strategy.run(step, given)
    assert of_frames.tolist() == list(range(24))
    assert of_words.tolist() != list(range(16))
    for out, numbers, arrays in zip(found, (of_words, of_frames), (words, frames), strict=True):
        expected = by_definition(*arrays[:3], causal=True)
        assert distance(_in_order(strategy, out, numbers), expected) < 1e-6


def _layer(x: jax.Array, w: Any, kind: str) -> jax.Array:
    heads = (jnp.einsum("bsd,dhe->bshe", x, w[name]) for name in "qkv")
    out = nn.attention(*heads, causal=True, kind=kind)
    return x + jnp.einsum("bshe,hed->bsd", out, w["out"])


def _loss(params: Any, x: jax.Array, y: jax.Array, kind: str) -> jax.Array:
    def one(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.jit(_layer, static_argnames="kind")(x, w, kind=kind), None

    for w in params:
        x, _ = jax.checkpoint(one)(x, w)
    return ((x - y) ** 2).mean()


def _params(layers: int, width: int, heads: int, d: int) -> Any:
    rng = np.random.default_rng(0)
    shapes = {**dict.fromkeys("qkv", (width, heads, d)), "out": (heads, d, width)}
    return [
        {n: rng.normal(size=s).astype("f4") * 0.3 for n, s in shapes.items()} for _ in range(layers)
    ]


@pytest.mark.parametrize("rules", ["replicated", "fsdp", "fsdp and heads over model"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_placed_parameters_train_as_on_one_device(kind: str, rules: str) -> None:
    params = _params(2, 16, 4, 4)
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(4, 32, 16)).astype("f4") for _ in range(2))
    names = ("data", "model", "positions") if "model" in rules else ("data", "positions")
    strategy = on_mesh((2, 2, 2) if "model" in rules else (4, 2), names)
    if "model" in rules:
        found = partition.Rules({"*/out": partition.Shard(2, 0)}, otherwise=partition.Shard(0, 1))
    else:
        found = partition.fsdp(min_bytes=0) if rules == "fsdp" else partition.replicated()

    def step(params: Any, x: Any, y: Any) -> Any:
        x, y = nn.split_positions((x, y))
        loss, grads = jax.value_and_grad(_loss)(params, x, y, kind)
        return jaxdist.get_replica_context().all_reduce("mean", (loss, grads))

    placed = partition.place(strategy, params, found)
    loss, grads = strategy.run(step, (placed, *rows_of(strategy, x, y)))
    expected = jax.value_and_grad(_loss)(params, x, y, kind)
    assert abs(float(loss) / float(expected[0]) - 1) < 1e-6
    assert distance(jax.tree.map(np.asarray, grads), expected[1]) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_nnx_may_call_it(kind: str) -> None:
    """Flax calls `attention_fn` with arguments of its own, which a function drops."""
    strategy = on_mesh((2, 4))

    def attend(q: Any, k: Any, v: Any, **_: Any) -> jax.Array:
        return nn.attention(q, k, v, kind=kind)

    model = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    plain = nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 16, 16)).astype("f4")
    found = strategy.run(lambda model, x: model(x), (model, *rows_of(strategy, x)))
    np.testing.assert_allclose(whole(strategy, found), plain(jnp.asarray(x)), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_over_stacked_layers_and_vmap_see_the_axis(kind: str) -> None:
    strategy = on_mesh((2, 4))
    params = jax.tree.map(lambda *x: np.stack(x), *_params(3, 8, 4, 2))
    x = np.random.default_rng(1).normal(size=(4, 16, 8)).astype("f4")

    def loss(params: Any, x: Any) -> jax.Array:
        row = jax.vmap(lambda x, w: _layer(x[None], w, kind)[0], in_axes=(0, None))
        body = jax.checkpoint(lambda x, w: (row(x, w), None))
        return (jax.lax.scan(body, x, params)[0] ** 2).mean()

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, nn.split_positions(x))
        return jaxdist.get_replica_context().all_reduce("mean", grads)

    found = strategy.run(step, (params, *rows_of(strategy, x)))
    assert distance(found, jax.grad(loss)(params, x)) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_those_of_one_device(kind: str) -> None:
    strategy = on_mesh((2, 4))
    q, k, v, *_ = draw(5, 2, 16, 4, 4, 3)

    def penalty(q: Any, k: Any, v: Any, attend: Any) -> Any:
        grads = jax.grad(lambda *a: (attend(*a, causal=True) ** 2).sum(), (0, 1, 2))(q, k, v)
        return sum((g**2).sum() for g in grads)

    def step(q: Any, k: Any, v: Any) -> Any:
        attend = functools.partial(nn.attention, kind=kind, block=3)
        return jax.grad(penalty, (0, 1, 2))(q, k, v, attend)

    found = strategy.run(step, rows_of(strategy, q, k, v))
    expected = jax.grad(penalty, (0, 1, 2))(q, k, v, by_definition)
    assert distance([whole(strategy, x) for x in found], expected) < 5e-6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_entries_have_a_result_without_entries(kind: str) -> None:
    strategy = on_mesh((2, 4))
    empty = np.zeros((0, 16, 4, 2), "f4")
    out = strategy.run(lambda x: nn.attention(x, x, x, kind=kind), rows_of(strategy, empty))
    assert whole(strategy, out).shape == empty.shape


def test_op_by_op_each_replica_computes_on_one_device() -> None:
    strategy = on_mesh((2, 4))
    q, k, v, *_ = draw(6, 2, 7, 2, 1, 4)

    def step(q: Any, k: Any, v: Any) -> Any:
        q, k, v = nn.split_positions((q, k, v))
        attend = jax.checkpoint(lambda q: nn.attention(q, k, v, causal=True, kind="ring"))
        return attend(q), jax.grad(lambda q: (attend(q) ** 2).sum())(q), nn.positions(7)

    with jaxdist.config.run_eagerly(True):
        out, grad, numbers = strategy.run(step, rows_of(strategy, q, k, v))
    assert numbers.tolist() == list(range(7))
    expected = by_definition(q, k, v, causal=True)
    assert distance(whole(strategy, out), expected) < 1e-6
    expected = jax.grad(lambda q: (by_definition(q, k, v, causal=True) ** 2).sum())(q)
    assert distance(whole(strategy, grad), expected) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_traced_with_explicit_types_works(kind: str) -> None:
    strategy = on_mesh((2, 4), explicit=True)
    q, k, v, *_ = draw(7, 2, 16, 4, 4, 4)
    heads = jax.sharding.PartitionSpec(None, None, "positions")

    def step(q: Any, k: Any, v: Any) -> Any:
        # It names an Explicit axis, so the step sees types with shardings: over heads, at first.
        q = jnp.einsum("bshd,de->bshe", q, jnp.eye(4), out_sharding=heads)
        q, k, v = nn.split_positions((q, k, v))
        grad = jax.grad(lambda q: (nn.attention(q, k, v, causal=True, kind=kind) ** 2).sum())(q)
        return nn.attention(q, k, v, causal=True, kind=kind), grad, nn.positions(16)

    out, grad, numbers = strategy.run(step, rows_of(strategy, q, k, v))
    expected = by_definition(q, k, v, causal=True)
    assert distance(_in_order(strategy, out, numbers), expected) < 2e-6
    expected = jax.grad(lambda q: (by_definition(q, k, v, causal=True) ** 2).sum())(q)
    assert distance(_in_order(strategy, grad, numbers), expected) < 2e-6
