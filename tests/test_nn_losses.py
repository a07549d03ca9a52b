"""Loss helpers: the sum over the replicas is the loss of the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica, get_replica_context, nn
from jaxdist.errors import ArgumentTypeError
from tests.tables import examples

TWO = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def test_average_loss_divides_by_the_global_batch() -> None:
    losses = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 10.0])])
    parts = TWO.run(nn.compute_average_loss, (losses,))
    assert [float(v) for v in parts.values] == [0.75, 3.25]
    assert float(TWO.reduce("SUM", parts, axis=None)) == np.mean([1, 2, 3, 10])


def test_average_loss_takes_the_size_that_it_is_given() -> None:
    losses = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 10.0])])
    parts = TWO.run(lambda v: nn.compute_average_loss(v, global_batch_size=8), (losses,))
    assert [float(v) for v in parts.values] == [0.375, 1.625]


def test_average_loss_outside_every_strategy_is_the_mean_over_dim_0() -> None:
    assert float(nn.compute_average_loss([1.0, 2.0])) == 1.5
    assert float(nn.compute_average_loss([[1.0, 2.0], [3.0, 4.0]])) == 5.0
    assert float(nn.compute_average_loss(np.zeros(0))) == 0.0


def test_average_loss_in_the_scope_needs_a_size() -> None:
    with TWO.scope():
        with pytest.raises(
            jaxdist.errors.ContextError, match=r"(?s)its scope.*global_batch_size"
        ) as e:
            nn.compute_average_loss([1.0, 2.0])
        assert isinstance(e.value, RuntimeError)
        assert float(nn.compute_average_loss([1.0, 2.0], global_batch_size=4)) == 0.75


def test_average_loss_in_a_merge_function_needs_a_size() -> None:
    def merge(strategy: Any, v: Any) -> Any:
        return nn.compute_average_loss([1.0, 2.0])

    with pytest.raises(jaxdist.errors.ContextError, match="merge function"):
        TWO.run(lambda: get_replica_context().merge_call(merge, args=(1.0,)))


def test_average_loss_of_a_scalar_is_refused() -> None:
    with pytest.raises(jaxdist.errors.ShapeError, match="one loss for each example") as e:
        nn.compute_average_loss(1.0)
    assert isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    ("shape", "weight", "wanted"),
    [
        ((2,), [1.0, 3.0], 3.5),
        ((2,), 2.0, 3.0),
        ((2,), [2, 3], 4.0),
        ((2,), [3.0], 4.5),
        ((2,), [[1.0], [10.0]], 10.5),
        ((2, 1), [1.0, 10.0], 10.5),
        ((2, 2), [1.0, 10.0], 36.5),
        ((2, 2), [[1.0], [10.0]], 36.5),
        ((2, 2), [[1.0, 10.0]], 32.0),
        ((2, 2), [[1.0, 10.0], [1.0, 1.0]], 14.0),
    ],
)
def test_weights_stand_for_the_leading_dims(
    shape: tuple[int, ...], weight: Any, wanted: float
) -> None:
    # The numbers are those of tf.nn.compute_average_loss in TensorFlow 2.21.
    loss = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    assert float(nn.compute_average_loss(loss, sample_weight=weight)) == wanted


@pytest.mark.parametrize(
    "weight", [[1.0, 2.0, 3.0], [[1.0, 2.0]], [[[1.0], [2.0]], [[1.0], [2.0]]]]
)
def test_weights_of_another_shape_are_refused_with_both_shapes(weight: Any) -> None:
    with pytest.raises(jaxdist.errors.ShapeError, match=r"shape \[2\] and sample_weight of shape"):
        nn.compute_average_loss([1.0, 2.0], sample_weight=weight)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_losses_keep_their_float_dtype(dtype: str) -> None:
    loss = jnp.asarray([1, 2], dtype)
    assert nn.compute_average_loss(loss).dtype == dtype
    assert nn.scale_regularization_loss(loss).dtype == dtype


def test_a_long_sum_of_narrow_losses_keeps_its_digits() -> None:
    loss = jnp.ones(4096, jnp.bfloat16)
    assert float(nn.compute_average_loss(loss)) == 1.0


@pytest.mark.parametrize("loss", [[1, 2], np.array([True, False]), np.array([1, 2], np.uint8)])
def test_integer_losses_become_floats(loss: Any) -> None:
    result = nn.compute_average_loss(loss)
    assert result.dtype == jnp.float32
    assert float(result) == float(np.mean(loss))


@pytest.mark.parametrize("size", [4.0, np.float32(4), True])
def test_a_size_that_is_no_integer_is_refused(size: Any) -> None:
    with pytest.raises(jaxdist.errors.ArgumentTypeError, match="an integer") as e:
        nn.compute_average_loss([1.0, 2.0], global_batch_size=size)
    assert isinstance(e.value, TypeError)


def test_a_size_of_each_replica_is_refused_with_what_sums_them() -> None:
    sizes = jaxdist.PerReplica([3, 4])
    with pytest.raises(ArgumentTypeError, match="one number for all replicas") as caught:
        nn.compute_average_loss(jnp.ones(4), global_batch_size=sizes)
    assert "all_reduce('sum', number_of_examples)" in str(caught.value)


def test_a_negative_size_or_a_vector_of_sizes_is_refused() -> None:
    with pytest.raises(jaxdist.errors.ArgumentError, match="-4"):
        nn.compute_average_loss([1.0, 2.0], global_batch_size=-4)
    with pytest.raises(jaxdist.errors.ShapeError, match=r"shape \[2\]"):
        nn.compute_average_loss([1.0, 2.0], global_batch_size=np.array([1, 2]))


def test_a_size_of_zero_gives_zero_and_a_finite_gradient() -> None:
    def loss(w: jax.Array, size: Any) -> jax.Array:
        return nn.compute_average_loss(w, global_batch_size=size)

    assert float(loss(jnp.ones(2), 0)) == 0.0
    grads = jax.jit(jax.grad(loss))(jnp.ones(2), jnp.asarray(0))
    np.testing.assert_array_equal(grads, [0.0, 0.0])


def test_the_gradient_under_jit_is_the_weight_over_the_batch() -> None:
    weight = jnp.asarray([1.0, 3.0])
    grads = jax.jit(jax.grad(lambda v: nn.compute_average_loss(v * v, weight)))(jnp.ones(2))
    np.testing.assert_allclose(grads, [1.0, 3.0])


@settings(deadline=None, max_examples=examples(25))
@given(st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_padded_batches_with_the_real_size_give_the_mean_over_real_examples(
    counts: list[int],
) -> None:
    losses = np.random.default_rng(sum(counts)).normal(size=(8, 4)).astype(np.float32)
    mask = np.arange(4)[None] < np.asarray(counts)[:, None]
    given_batch = jax.device_put((losses.ravel(), mask.ravel()), EIGHT.per_replica_sharding)
    found = EIGHT.run(_masked, given_batch)
    wanted = losses[mask].mean() if mask.any() else 0.0
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


EIGHT = jaxdist.MirroredStrategy()


def _masked(loss: Any, mask: Any) -> Any:
    context = get_replica_context()
    size = context.all_reduce("sum", mask.sum())
    return context.all_reduce("sum", nn.compute_average_loss(loss, mask, global_batch_size=size))


def test_regularization_is_counted_once_over_all_replicas() -> None:
    assert float(nn.scale_regularization_loss([1.0, 2.0])) == 3.0
    assert float(nn.scale_regularization_loss(3)) == 3.0
    found = TWO.run(nn.scale_regularization_loss, (np.array([1.0, 2.0]),))
    assert float(found) == 1.5
    total = EIGHT.run(
        lambda w: get_replica_context().all_reduce("sum", nn.scale_regularization_loss(w)), (5.0,)
    )
    assert float(total) == 5.0


def test_regularization_in_the_scope_is_refused() -> None:
    with TWO.scope(), pytest.raises(jaxdist.errors.ContextError, match=r"strategy\.run"):
        nn.scale_regularization_loss([1.0])


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_training_with_the_helpers_is_the_same_on_any_number_of_replicas(count: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            data = nn.compute_average_loss((x @ w - y) ** 2)
            return data + 0.1 * nn.scale_regularization_loss(w * w)

        return w - 0.1 * get_replica_context().all_reduce("sum", jax.grad(loss)(w))

    w, wanted = np.ones(3, np.float32), np.ones(3)
    for _ in range(3):
        w = strategy.run(step, (w, *jax.device_put((x, y), strategy.per_replica_sharding)))
        wanted -= 0.1 * (2 * x.T @ (x @ wanted - y) / 16 + 0.2 * wanted)
    np.testing.assert_allclose(w, wanted, rtol=1e-5)


@pytest.mark.parametrize("size", [2**32 + 8, np.int64(2**32 + 8), np.uint64(2**63), np.uint8(200)])
def test_a_global_batch_size_keeps_its_upper_bits(size: Any) -> None:
    found = nn.compute_average_loss(np.ones(4, np.float32), global_batch_size=size)
    assert float(found) == pytest.approx(4 / int(size))


def test_a_global_batch_size_that_is_an_array_of_jax_is_checked_in_a_step() -> None:
    def average(number: int) -> Any:
        # Made outside of the step, so it is not traced.
        size = jnp.int32(number)
        return TWO.run(lambda v: nn.compute_average_loss(v, global_batch_size=size), (jnp.ones(4),))

    assert float(average(8)) == 0.5
    with pytest.raises(jaxdist.errors.ArgumentError, match="was given global_batch_size=-8"):
        average(-8)
