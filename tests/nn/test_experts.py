"""A mixture of experts: the same choices, drops, results and gradients on every layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import get_replica_context, nn, partition
from tests.nn.experts_oracle import (
    EXPERTS,
    LAYOUTS,
    WIDTH,
    Params,
    expert,
    largest_error,
    loss_of,
    make,
    make_params,
    make_rows,
    place,
    run,
    run_oracle,
    weights_of,
)
from tests.tables import examples

OPTIONS: list[dict[str, Any]] = [
    {},
    {"capacity": None},
    {"capacity": 0.5},
    {"group": 4},
    {"top_k": 1, "group": 6},
    {"top_k": 3, "capacity": 1.1},
    {"top_k": 8, "capacity": 0.1},
]
_IDS = [" ".join(f"{k}={v}" for k, v in o.items()) or "defaults" for o in OPTIONS]


@pytest.mark.parametrize("options", OPTIONS, ids=_IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_drops_and_gradients_are_those_of_explicit_queues_on_each_layout(
    layout: tuple[int, int], options: dict[str, Any]
) -> None:
    params, x = make_params(), make_rows()
    strategy = make(layout)
    found, grads = run(strategy, lambda p, x: loss_of(p, x, **options), place(strategy, params), x)
    wanted, of_oracle = run_oracle(params, x, **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert largest_error(grads, of_oracle) <= 1e-6
    # The cases are no empty ones: something is dropped, or nothing can be.
    assert (wanted[2] > 0) == (options.get("capacity", 1) is not None)


def test_drops_are_equal_to_the_bit_on_four_layouts() -> None:
    params, x = make_params(), make_rows(tokens=16)
    found = set()
    for layout in LAYOUTS:
        strategy = make(layout)
        results, _ = run(strategy, loss_of, place(strategy, params), x)
        found.add(results[2])
    assert len(found) == 1
    assert found.pop() > 0.01


@settings(max_examples=examples(6, 100))
@given(data=st.data())
def test_any_sizes_on_any_layout_are_those_of_explicit_queues(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    experts = layout[1] * data.draw(st.integers(1, 3))
    top_k = data.draw(st.integers(1, experts))
    group = data.draw(st.integers(1, 5))
    tokens = group * data.draw(st.integers(1, 3))
    rows = layout[0] * data.draw(st.integers(1, 2))
    capacity = data.draw(st.none() | st.sampled_from([0.01, 0.3, 1, 1.1, 2.5, 100]))
    options = {"top_k": top_k, "group": group, "capacity": capacity}
    seed = data.draw(st.integers(0, 1000))
    params, x = make_params(seed, experts), make_rows(rows, tokens, seed)
    strategy = make(layout)
    found, grads = run(strategy, lambda p, x: loss_of(p, x, **options), place(strategy, params), x)
    wanted, of_oracle = run_oracle(params, x, **options)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
    # A gradient of 0 in exact numbers, such as that of a router without choice, is a rounding.
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, of_oracle[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_groups_that_the_devices_do_not_divide_are_computed_alike(rows: int) -> None:
    params, x = make_params(), make_rows(rows)
    wanted, of_oracle = run_oracle(params, x)
    for size in (4, 8):
        strategy = make((1, size))
        found, grads = run(strategy, loss_of, place(strategy, params), x)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert largest_error(grads, of_oracle) <= 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_the_tokens_is_that_of_explicit_queues(layout: tuple[int, int]) -> None:
    params, x = make_params(), make_rows()
    scale = {"scale": np.ones((1, 1, WIDTH), np.float32)}
    wanted = jax.grad(lambda s: loss_of(params, x * s["scale"])[0])(scale)

    def loss(scale: Params, x: Any) -> Any:
        return loss_of(params, x * scale["scale"])[0]

    _, grads = run(make(layout), loss, scale, x)
    assert largest_error(grads, wanted) <= 1e-6


def test_first_choices_come_before_second_ones_and_tokens_in_their_order() -> None:
    # Tokens 0 and 1 choose expert 0 second; token 2 chooses it first. It takes two tokens.
    logits = np.array([[1.0, 2.0, -9.0], [1.0, -9.0, 2.0], [2.0, 1.0, -9.0]], np.float32)
    x = np.eye(3, dtype=np.float32)[None]
    y, (_, dropped) = nn.experts(
        lambda w, rows: rows * w, logits, np.ones(3, np.float32), x, top_k=2, capacity=1.0
    )
    share = float(jax.nn.softmax(jnp.array([2.0, 1.0]))[0])
    # Token 1 comes after tokens 2 and 0, and keeps the weight of its first choice.
    np.testing.assert_allclose(np.diagonal(y[0]), [1, share, 1], rtol=1e-6)
    np.testing.assert_allclose(dropped, 1 / 6, rtol=1e-6)


def test_of_equal_probabilities_the_lower_expert_is_chosen_on_each_layout() -> None:
    params, x = make_params(), make_rows()
    params["router"] = np.zeros_like(params["router"])
    wanted, of_oracle = run_oracle(params, x)
    for layout in LAYOUTS:
        strategy = make(layout)
        found, grads = run(strategy, loss_of, place(strategy, params), x)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert largest_error(grads, of_oracle) <= 1e-6
        assert not grads["up"][2:].any(), "experts 0 and 1 are chosen"


def test_the_balance_loss_of_equal_shares_is_1() -> None:
    x = np.eye(4, dtype=np.float32)[None]
    _, (balance, dropped) = nn.experts(
        lambda w, rows: rows * w, np.eye(4, dtype=np.float32), np.ones(4, np.float32), x, top_k=1
    )
    np.testing.assert_allclose(balance, 1, rtol=1e-6)
    assert float(dropped) == 0


def test_a_capacity_in_decimals_is_no_slot_more() -> None:
    # 1.1 * 2 * 40 / 8 is 11, and in floats 11.000000000000002.
    x = make_rows(1, 40)
    params = make_params()
    sizes = []

    def count(w: Any, rows: Any) -> Any:
        sizes.append(rows.shape[0])
        return rows

    capacities: list[Any] = [1.1, np.float32(1.1), 1, None]
    for capacity in capacities:
        nn.experts(count, params["router"], weights_of(params), x, top_k=2, capacity=capacity)
    assert sizes == [11, 11, 10, 40]


def test_a_token_whose_choices_are_all_dropped_has_the_result_0() -> None:
    x = np.ones((1, 4, 2), np.float32)
    y, (_, dropped) = nn.experts(
        lambda w, rows: rows * w, np.ones((2, 2)), np.ones(2, np.float32), x, top_k=1, capacity=0.5
    )
    assert np.asarray(y)[0].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert float(dropped) == 0.75


def test_other_dims_before_the_tokens_are_rows() -> None:
    params, x = make_params(), make_rows()
    flat, aux = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
    y, found = nn.experts(
        expert, params["router"], weights_of(params), x.reshape(2, 2, 2, 12, WIDTH), top_k=2
    )
    assert np.array_equal(y.reshape(flat.shape), flat)
    assert found == aux
    row, _ = nn.experts(expert, params["router"], weights_of(params), x[0], top_k=2)
    np.testing.assert_allclose(row, flat[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 12, WIDTH), (8, 0, WIDTH), (0, WIDTH)])
def test_no_tokens_give_no_results_and_losses_of_0(shape: tuple[int, ...]) -> None:
    params = make_params()
    x = np.zeros(shape, np.float32)

    def loss(params: Params, x: Any) -> Any:
        y, (balance, dropped) = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
        return y.sum() + balance + dropped

    value, grads = jax.value_and_grad(loss)(params, x)
    assert float(value) == 0
    assert not any(g.any() for g in jax.tree.leaves(grads))
    strategy = make((2, 4))
    if len(shape) == 3:
        found, grads = run(strategy, loss, place(strategy, params), x)
        assert found == [0]


def _train(layout: tuple[int, int]) -> list[float]:
    strategy = make(layout)
    tx = optax.adam(1e-2)
    params = place(strategy, make_params())
    state = tx.init(params)
    rng = np.random.default_rng(5)
    target = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Params) -> Any:
            out, (balance, _) = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
            return ((x + out - y) ** 2).mean() + 0.01 * balance

        context = get_replica_context()
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(context.all_reduce("mean", grads), state, params)
        return optax.apply_updates(params, updates), state, context.all_reduce("mean", loss)

    losses = []
    for _ in range(50):
        x = rng.normal(size=(8, 12, WIDTH)).astype(np.float32)
        batch = jax.device_put((x, x @ target), strategy.per_replica_sharding)
        params, state, loss = strategy.run(step, (params, state, *batch))
        losses.append(float(loss))
    return losses


def test_50_losses_are_equal_on_four_layouts() -> None:
    one, *others = [_train(layout) for layout in LAYOUTS]
    assert one[-1] < 0.8 * one[0]
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-4)


class Experts(nnx.Module):
    """A layer whose experts are one NNX module, stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=EXPERTS)
        @nnx.vmap
        def make_experts(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.experts = make_experts(rngs)
        self.router = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, EXPERTS)))

    def __call__(self, x: Any) -> Any:
        return nn.experts(
            lambda layer, rows: nnx.relu(layer(rows)), self.router, self.experts, x, top_k=2
        )


@pytest.mark.parametrize("place_by", ["split", "fsdp"])
def test_stacked_modules_of_nnx_are_experts(place_by: str) -> None:
    x = make_rows()
    rules = {
        "split": partition.Rules(
            [("experts/*", partition.Split(0))], otherwise=partition.Replicate()
        ),
        "fsdp": partition.fsdp(min_bytes=0),
    }

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            y, (balance, _) = model(x)
            return ((y - 1) ** 2).mean() + 0.01 * balance

        context = get_replica_context()
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, context.all_reduce("mean", grads))
        return context.all_reduce("mean", loss)

    losses = []
    for layout in LAYOUTS:
        strategy = make(layout)
        model = Experts(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        model, optimizer = partition.place(strategy, (model, optimizer), rules[place_by])
        rows = jax.device_put(x, strategy.per_replica_sharding)
        losses.append([float(strategy.run(step, (model, optimizer, rows))) for _ in range(4)])
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
