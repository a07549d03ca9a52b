"""A router that is a function: choices, losses and gradients are those of experts one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist import get_replica_context, nn, partition
from jaxdist.errors import ArgumentTypeError, ShapeError
from tests.nn.experts_oracle import (
    EXPERTS,
    LAYOUTS,
    WIDTH,
    expert,
    largest_error,
    loss_of,
    make,
    make_params,
    make_rows,
    place,
    run,
    weights_of,
)

PARAMS, X = make_params(), make_rows()


def _with_function(params: Any, x: Any, **options: Any) -> Any:
    return loss_of({**params, "router": lambda x: x @ params["router"]}, x, **options)


@pytest.mark.parametrize("options", [{}, {"capacity": None}, {"group": 4}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_function_that_multiplies_by_a_matrix_is_that_matrix(
    layout: tuple[int, int], options: dict[str, Any]
) -> None:
    strategy = make(layout)
    params = place(strategy, PARAMS)
    found, grads = run(strategy, lambda p, x: _with_function(p, x, **options), params, X)
    wanted, of_matrix = run(strategy, lambda p, x: loss_of(p, x, **options), params, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert largest_error(grads, of_matrix) <= 2e-6


class _Mixture(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(WIDTH, EXPERTS, bias_init=nnx.initializers.normal(1), rngs=rngs)
        self.experts = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(
            rngs.split(EXPERTS)
        )


def _one_by_one(model: _Mixture, x: Any) -> Any:
    """Every expert computes every token, and the two largest logits are its weights."""
    logits = model.router(x)
    smallest = jax.lax.top_k(logits, 2)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(logits < smallest, -jnp.inf, logits))
    graphdef, state = nnx.split(model.experts)
    y = jnp.zeros_like(x)
    for n in range(EXPERTS):
        own = nnx.merge(graphdef, jax.tree.map(lambda w, n=n: w[n], state))
        y += weights[..., n : n + 1] * own(x)
    return y


@pytest.mark.parametrize("placement", ["whole", "fsdp"])
@pytest.mark.parametrize("layout", [(2, 4), (8, 1)])
def test_a_linear_layer_with_a_bias_routes(layout: tuple[int, int], placement: str) -> None:
    strategy = make(layout)
    otherwise = partition.Shard(min_bytes=0) if placement == "fsdp" else partition.Replicate()
    rules = partition.Rules([("experts/**", partition.Split(0))], otherwise=otherwise)
    model = partition.place(strategy, _Mixture(nnx.Rngs(0)), rules)

    def loss_fn(model: _Mixture, x: Any) -> Any:
        y, _ = nn.experts(
            lambda e, rows: e(rows), model.router, model.experts, x, top_k=2, capacity=None
        )
        return (y**2).mean()

    def step(model: _Mixture, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_fn)(model, x)
        return get_replica_context().all_reduce("mean", (loss, grads))

    rows = jax.device_put(X, strategy.per_replica_sharding)
    loss, grads = strategy.run(step, (model, rows))

    def reference(model: _Mixture, x: Any) -> Any:
        return (_one_by_one(model, x) ** 2).mean()

    wanted, of_loop = nnx.value_and_grad(reference)(_Mixture(nnx.Rngs(0)), X)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    found = jax.tree.map(np.asarray, partition.gather(grads))
    assert largest_error(nnx.to_pure_dict(found), nnx.to_pure_dict(of_loop)) <= 2e-6


def test_a_router_may_use_what_no_matrix_has() -> None:
    """A token follows its neighbour: the logits of the token before it."""

    def shifted(x: Any) -> Any:
        return jnp.roll(x @ PARAMS["router"], 1, axis=1)

    def loss_fn(params: Any, x: Any) -> Any:
        return loss_of({**params, "router": shifted}, x)

    found, _ = run(make((2, 4)), loss_fn, place(make((2, 4)), PARAMS), X)
    np.testing.assert_allclose(found[0], jax.jit(loss_fn)(PARAMS, X)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("router", "kind", "texts"),
    [
        (lambda x: None, ArgumentTypeError, ["router, which returned None", "x @ kernel + bias"]),
        (lambda x: (x, x), ArgumentTypeError, ["router, which returned"]),
        (lambda x: x.astype(int), ArgumentTypeError, ["router, which returned", "floating-point"]),
        (lambda x: x[0], ShapeError, ["[12, 6] for x of the shape [2, 12, 6]", "experts]"]),
        (lambda x: x[:, :-1], ShapeError, ["[2, 11, 6]", "shape [2, 12, experts]"]),
        (lambda x: x[..., None], ShapeError, ["[2, 12, 6, 1]"]),
    ],
)
def test_a_function_that_returns_no_logits_is_refused(
    router: Any, kind: type[Exception], texts: list[str]
) -> None:
    with pytest.raises(kind) as error:
        nn.experts(expert, router, weights_of(PARAMS), make_rows(2), top_k=2)
    text = str(error.value)
    assert text.startswith("nn.experts was given router, which returned"), text
    assert all(part in text for part in texts), text


def test_weights_of_other_experts_than_the_logits_are_refused() -> None:
    with pytest.raises(ShapeError, match="router with 6 columns"):
        nn.experts(expert, lambda x: x, weights_of(PARAMS), make_rows(2), top_k=2)


def test_a_parameter_of_nnx_is_a_matrix() -> None:
    """Variables can be called, too."""
    y, _ = nn.experts(expert, nnx.Param(PARAMS["router"]), weights_of(PARAMS), X, top_k=2)
    wanted, _ = nn.experts(expert, PARAMS["router"], weights_of(PARAMS), X, top_k=2)
    np.testing.assert_array_equal(y, wanted)


def test_groups_that_the_devices_do_not_divide_are_routed_alike() -> None:
    strategy, x = make((2, 4)), make_rows(6)
    params = place(strategy, PARAMS)
    found, grads = run(strategy, _with_function, params, x)
    wanted, of_matrix = run(strategy, loss_of, params, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert largest_error(grads, of_matrix) <= 2e-6
