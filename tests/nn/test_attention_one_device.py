"""Attention on one device: blocks, masks, dtypes and derivatives, beside its definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import nn
from tests.nn.attention import by_definition, distance, draw
from tests.tables import examples

# Row blocks are as long as memory allows, so a limit makes several of few rows.
LIMITS = st.sampled_from([1, 1 << 12, 1 << 25])


def _gradients(attend: Any, q: Any, k: Any, v: Any, weights: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v)
        return (out * weights).sum(), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 99),
    rows=st.integers(1, 3),
    positions=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    d=st.integers(1, 9),
    block=st.integers(1, 50),
    causal=st.booleans(),
    has_segments=st.booleans(),
    scale=st.sampled_from([None, 0.3, -1.0, 0]),
    limit=LIMITS,
)
def test_any_shape_mask_and_block_gives_the_values_and_gradients_of_the_definition(
    seed: int,
    rows: int,
    positions: int,
    kv_heads: int,
    group: int,
    d: int,
    block: int,
    causal: bool,
    has_segments: bool,
    scale: Any,
    limit: int,
) -> None:
    *arrays, segments = draw(seed, rows, positions, kv_heads * group, kv_heads, d)
    ids = segments if has_segments else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdist.nn._attention.kernel._MOST_BYTES", limit)
        found = _gradients(
            lambda q, k, v: nn.attention(
                q, k, v, causal=causal, segment_ids=ids, scale=scale, block=block
            ),
            *arrays,
        )
    expected = _gradients(
        lambda q, k, v: by_definition(q, k, v, causal=causal, segments=ids, scale=scale), *arrays
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * max(1, np.abs(b).max()))


def test_it_is_the_function_of_jax() -> None:
    q, k, v, *_ = draw(0, 2, 24, 6, 3, 8)
    found = nn.attention(q, k, v, causal=True, block=7)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_have_scores_and_sums_in_float32(dtype: str) -> None:
    *arrays, _ = draw(1, 1, 600, 2, 1, 16)
    q, k, v, weights = (jnp.asarray(x, dtype) for x in arrays)
    found, out = _gradients(lambda *a: nn.attention(*a, causal=True, block=64), q, k, v, weights)
    assert {str(x.dtype) for x in (out, *found)} == {dtype}
    wide = [x.astype(jnp.float32) for x in (q, k, v, weights)]
    expected = _gradients(lambda *a: by_definition(*a, causal=True), *wide)
    narrow = float(jnp.finfo(dtype).eps)
    assert distance((found, out), expected) < 3 * narrow


def test_float16_keeps_weights_that_are_smaller_than_its_smallest_number() -> None:
    ones = jnp.ones((1, 4096, 1, 4), "float16")
    weights = ones.at[:, ::2].set(0.01)

    def loss(v: jax.Array) -> jax.Array:
        return (nn.attention(ones * 0, ones * 0, v) * weights).astype(jnp.float32).sum()

    gradient = jax.grad(loss)(ones)
    np.testing.assert_allclose(np.asarray(gradient, "f4"), 0.505, rtol=2e-3)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, "float64") for x in draw(2, 1, 33, 2, 1, 4)[:4]]
        found = _gradients(lambda *a: nn.attention(*a, causal=True, block=8), *arrays)
        expected = _gradients(lambda *a: by_definition(*a, causal=True), *arrays)
        assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float64"}
        assert distance(found, expected) < 1e-13


@pytest.mark.parametrize("shape", [(0, 4, 2, 3), (2, 0, 2, 3), (2, 4, 0, 3), (2, 4, 2, 0)])
def test_arrays_without_entries_have_a_result_without_entries(shape: tuple[int, ...]) -> None:
    empty = jnp.zeros(shape)
    assert nn.attention(empty, empty, empty, causal=True).shape == shape
    assert jax.grad(lambda q: nn.attention(q, empty, empty).sum())(empty).shape == shape


def test_padding_is_a_segment_and_gives_no_nan() -> None:
    q, k, v, weights, _ = draw(3, 2, 20, 2, 2, 4)
    segments = np.where(np.arange(20) < 13, 7, -1)[None].repeat(2, 0)
    # Values of padding that would show.
    q, k, v = (np.where(np.arange(20)[None, :, None, None] < 13, x, 1e4) for x in (q, k, v))

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        return nn.attention(q, k, v, segment_ids=segments, causal=True, block=4)

    grads, out = _gradients(attend, q, k, v, weights)
    alone = by_definition(q[:, :13], k[:, :13], v[:, :13], causal=True)
    np.testing.assert_allclose(out[:, :13], alone, atol=1e-6)
    assert all(bool(jnp.isfinite(x).all()) for x in (*grads, out))
    # Each position with a segment of its own sees itself.
    own = nn.attention(q, k, v, segment_ids=np.arange(40).reshape(2, 20))
    np.testing.assert_allclose(own, v, rtol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, weights, _ = draw(4, 1, 16, 1, 1, 4)
    grads, out = _gradients(
        lambda *a: nn.attention(*a, causal=True, block=4), q * 1e9, k * 1e9, v, weights
    )
    assert all(bool(jnp.isfinite(x).all()) for x in (*grads, out))


def test_second_derivatives_are_those_of_the_definition() -> None:
    q, k, v, weights, segments = draw(5, 1, 13, 4, 2, 3)

    def penalty(attend: Any) -> Any:
        def total(q: Any, k: Any, v: Any) -> Any:
            grads = jax.grad(lambda *a: (attend(*a) ** 2 * weights).sum(), (0, 1, 2))(q, k, v)
            return sum((g**2).sum() for g in grads)

        return total

    def ours(*a: Any) -> jax.Array:
        return nn.attention(*a, causal=True, segment_ids=segments, block=4)

    def theirs(*a: Any) -> jax.Array:
        return by_definition(*a, causal=True, segments=segments)

    found = jax.grad(penalty(ours), (0, 1, 2))(q, k, v)
    assert distance(found, jax.grad(penalty(theirs), (0, 1, 2))(q, k, v)) < 1e-5
    forward = jax.jvp(jax.grad(lambda q: (ours(q, k, v) ** 2).sum()), (q,), (weights,))[1]
    expected = jax.jvp(jax.grad(lambda q: (theirs(q, k, v) ** 2).sum()), (q,), (weights,))[1]
    assert distance(forward, expected) < 1e-5


def test_the_forward_derivative_is_the_error_of_jax() -> None:
    q, k, v, *_ = draw(6, 1, 8, 1, 1, 2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: nn.attention(q, k, v), (q,), (q,))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, axis_size=1)])
def test_transformations_of_jax_work_around_it(wrap: Any) -> None:
    q, k, v, *_ = draw(7, 2, 8, 2, 1, 4)

    def loss(q: Any) -> jax.Array:
        return (nn.attention(q, k, v, causal=True) ** 2).sum()

    is_mapped = wrap not in (jax.jit, jax.checkpoint)
    found = jax.grad(lambda q: wrap(loss)(q[None] if is_mapped else q).sum())(jnp.asarray(q))
    expected = jax.grad(lambda q: (by_definition(q, k, v, causal=True) ** 2).sum())(q)
    assert distance(found, expected) < 1e-6


def test_products_have_the_precision_of_the_call() -> None:
    q = jnp.ones((1, 8, 1, 4))
    with jax.default_matmul_precision("highest"):
        primal, pull = jax.vjp(lambda q: nn.attention(q, q, q), q)
    back = jax.make_jaxpr(pull)(primal)
    assert "HIGHEST" in str(back)
    assert "precision=None" not in str(back)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_outside_of_a_step_one_mesh_of_jax_computes_it(explicit: bool) -> None:
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    arrays = draw(8, 2, 16, 8, 4, 4)[:3]
    spec = jax.sharding.PartitionSpec("data", None, "model")
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, spec))
        found = jax.jit(lambda *a: nn.attention(*a, causal=True))(*placed)
    assert distance(found, by_definition(*arrays, causal=True)) < 1e-6
    if explicit:
        assert tuple(found.sharding.spec) == (*spec, None)


def test_on_one_device_and_in_a_scope_nothing_is_moved() -> None:
    q, k, v, *_ = draw(9, 1, 7, 2, 1, 4)

    def step(q: Any, k: Any, v: Any) -> Any:
        q, k, v = nn.split_positions((q, k, v))
        return nn.attention(q, k, v, causal=True, kind="ring"), nn.positions(q.shape[1])

    expected = by_definition(q, k, v, causal=True)
    for strategy in (jaxdist.OneDeviceStrategy("cpu:0"), jaxdist.MirroredStrategy(["cpu:0"])):
        found, numbers = strategy.run(step, (q, k, v))
        assert distance(found, expected) < 1e-6
        assert numbers.tolist() == list(range(7))
    with jaxdist.MirroredStrategy().scope():
        found, numbers = step(q, k, v)
    assert distance(found, expected) < 1e-6
