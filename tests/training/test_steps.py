"""Gradient accumulation and several steps in one dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxdist.errors import ArgumentError, ArgumentTypeError, ShapeError
from jaxdist.training import accumulate_gradients, multi_step


def _loss(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def _batch(rows: int, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(rows,)), jnp.float32),
    }


class _Net(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(1))
        self.last = nnx.Linear(4, 1, rngs=nnx.Rngs(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.norm(self.first(x))))[:, 0]


def _net_loss(net: _Net, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_accumulated_gradients_equal_those_of_the_whole_batch(pieces: int) -> None:
    w, batch = jnp.arange(3.0), _batch(8)
    x, y = np.asarray(batch["x"], np.float64), np.asarray(batch["y"], np.float64)
    error = x @ np.arange(3.0) - y
    loss, grad = jax.jit(accumulate_gradients(jax.value_and_grad(_loss), pieces))(w, batch)
    np.testing.assert_allclose(loss, np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * x.T @ error / 8, rtol=1e-5)


def test_accumulation_in_16_bits_sums_in_32() -> None:
    # 1 + 256 * 2**-8 in bfloat16 additions never leaves 1.
    values = jnp.full((257,), 2.0**-8, jnp.bfloat16).at[0].set(1.0)
    total = accumulate_gradients(lambda _, x: x[0], 257)(None, values)
    assert total.dtype == jnp.bfloat16
    np.testing.assert_allclose(float(total) * 257, 2.0, rtol=2e-2)


def test_accumulation_calls_the_function_once_however_many_pieces_there_are() -> None:
    traces = []

    def grads(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        traces.append(1)
        return jax.grad(_loss)(w, batch)

    jax.jit(accumulate_gradients(grads, 8))(jnp.ones(3), _batch(32))
    assert len(traces) <= 2


def test_accumulation_over_an_nnx_module_keeps_its_batch_statistics() -> None:
    net, by_hand = _Net(), _Net()
    batch = _batch(8)
    grad_fn = nnx.value_and_grad(_net_loss, argnums=nnx.DiffState(0, nnx.Param))
    loss, grads = nnx.jit(accumulate_gradients(grad_fn, 2))(net, batch)

    halves = [jax.tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batch) for i in range(2)]
    expected = [grad_fn(by_hand, half) for half in halves]
    np.testing.assert_allclose(loss, np.mean([e[0] for e in expected]), rtol=1e-5)
    np.testing.assert_allclose(
        grads["first"]["kernel"][...],
        np.mean([e[1]["first"]["kernel"][...] for e in expected], axis=0),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(net.norm.mean[...], by_hand.norm.mean[...], rtol=1e-5)
    assert not np.allclose(net.norm.mean[...], 0)


def test_accumulation_of_indivisible_rows_names_every_leaf_and_both_numbers() -> None:
    accumulated = accumulate_gradients(jax.grad(_loss), 4)
    with pytest.raises(ShapeError) as caught:
        accumulated(jnp.ones(3), {**_batch(30), "weight": jnp.float32(1)})
    message = str(caught.value)
    assert "batch['x'] is float32[30, 3]: 30 rows are not a multiple of 4" in message
    assert "drop 2 row(s) to get 28, or pad with 2 to get 32" in message
    assert "batch['y']" in message
    assert "batch['weight'] is float32[]: a scalar" in message


def test_accumulation_of_fewer_rows_than_pieces_says_to_pad() -> None:
    with pytest.raises(ShapeError, match=r"2 rows are not a multiple of 4; pad with 2 to get 4"):
        accumulate_gradients(jax.grad(_loss), 4)(jnp.ones(3), _batch(2))


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4"])
def test_accumulation_over_no_positive_number_of_pieces_is_refused(count: object) -> None:
    with pytest.raises(ArgumentError, match="one integer from 1 up"):
        accumulate_gradients(jax.grad(_loss), count)  # type: ignore[arg-type]


def test_accumulation_of_an_integer_result_names_it() -> None:
    def grads(w: jax.Array, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"grad": jax.grad(_loss)(w, batch), "rows": jnp.int32(4)}

    with pytest.raises(ArgumentTypeError, match=r"result\['rows'\] is int32\[\]"):
        accumulate_gradients(grads, 2)(jnp.ones(3), _batch(8))


def test_steps_in_one_dispatch_equal_the_steps_one_by_one() -> None:
    def step(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(_loss)(w, batch)
        return w - 0.1 * grad, loss

    batches = [_batch(8, seed) for seed in range(5)]
    w, losses = jax.jit(multi_step(step))(jnp.ones(3), batches)
    expected, by_hand = jnp.ones(3), []
    for batch in batches:
        expected, loss = step(expected, batch)
        by_hand.append(loss)
    np.testing.assert_allclose(w, expected, rtol=1e-6)
    np.testing.assert_allclose(losses, by_hand, rtol=1e-6)


def test_steps_in_one_dispatch_update_nnx_state_in_place_and_return_plain_values_anew() -> None:
    def step(state: dict, batch: dict[str, jax.Array]) -> tuple[dict, jax.Array]:
        net, optimizer = state["net"], state["optimizer"]
        loss, grads = nnx.value_and_grad(_net_loss)(net, batch)
        optimizer.update(net, grads)
        return {**state, "seen": state["seen"] + 8}, loss

    def fresh() -> dict:
        net = _Net()
        optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
        return {"net": net, "optimizer": optimizer, "seen": jnp.int32(0)}

    batches = [_batch(8, seed) for seed in range(3)]
    state, by_hand = fresh(), fresh()
    after, losses = multi_step(step)(state, batches)
    expected = []
    for batch in batches:
        by_hand, loss = step(by_hand, batch)
        expected.append(loss)
    assert after["net"] is state["net"]
    assert int(after["seen"]) == 24
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(
        state["net"].first.kernel[...], by_hand["net"].first.kernel[...], rtol=1e-3, atol=1e-5
    )
    assert int(state["optimizer"].step[...]) == 3


def test_batches_of_another_shape_are_named_with_both_shapes() -> None:
    with pytest.raises(ShapeError) as caught:
        multi_step(lambda s, b: (s, b["x"]))(0, [_batch(8), _batch(8), _batch(5)])
    message = str(caught.value)
    assert "batches[2]['x'] is float32[5, 3], in batches[0] it is float32[8, 3]" in message
    assert "batches[1]" not in message


def test_batches_of_another_dtype_are_not_promoted() -> None:
    with pytest.raises(
        ShapeError, match=r"batches\[1\] is float32\[4\], in batches\[0\] it is int32"
    ):
        multi_step(lambda s, b: (s, b))(0, [jnp.arange(4), jnp.ones(4)])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda s, b: ({"w": jnp.tile(s["w"], 2)}, b),
            r"state\['w'\] was float32\[3\], and is .*\[6\]",
        ),
        (lambda s, b: ({"w": s["w"].astype("bfloat16")}, b), r"float32\[3\], and is bfloat16\[3\]"),
        (lambda s, b: ({"w": s["w"], "n": b}, b), "has a different structure"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_state_that_changes_its_form_is_named(step: Any, message: str) -> None:
    with pytest.raises(
        ShapeError, match=f"multi_step called step_fn, and the state (.|\n)*{message}"
    ):
        multi_step(step)({"w": jnp.ones(3)}, [jnp.ones(2)] * 2)


def test_state_of_a_module_that_changes_its_form_is_named() -> None:
    net = _Net()

    def grads(net: _Net, batch: dict[str, jax.Array]) -> jax.Array:
        net.norm.mean[...] = net.norm.mean[...]
        net.norm.mean.set_value(jnp.zeros(7))
        return jnp.sum(batch["x"])

    with pytest.raises(
        ShapeError, match=r"accumulate_gradients called grad_fn(.|\n)*norm.*float32\[7\]"
    ):
        accumulate_gradients(grads, 2)(net, _batch(8))


def test_numbers_of_python_and_random_keys_are_state() -> None:
    def step(state: Any, batch: jax.Array) -> Any:
        total, key = state
        return (total + batch.sum(), jax.random.fold_in(key, 1)), jax.random.uniform(key)

    batches = [jnp.ones(2)] * 3
    (total, _), drawn = multi_step(step)((0.0, jax.random.key(0)), batches)
    assert float(total) == 6
    assert len(set(drawn.tolist())) == 3


def test_no_batches_and_a_single_array_are_refused() -> None:
    with pytest.raises(ArgumentError, match="which is empty"):
        multi_step(lambda s, b: (s, b))(0, [])
    with pytest.raises(ArgumentTypeError, match="list or tuple"):
        multi_step(lambda s, b: (s, b))(0, jnp.ones((3, 4)))  # type: ignore[arg-type]


def test_the_mean_of_infinite_complex_gradients_keeps_the_other_part() -> None:
    x = jnp.full(3, complex(np.inf, 1), jnp.complex64)
    assert complex(accumulate_gradients(lambda w, x: x[0], 3)(1.0, x)) == complex(np.inf, 1)
