"""A mixture of experts inside of other functions, and with other executors, meshes and dtypes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxdist
from jaxdist import get_replica_context, nn, partition
from tests.nn.experts_oracle import (
    EXPERTS,
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

PARAMS, X = make_params(), make_rows()
Loss = Callable[[Params, Any], Any]


def _check(loss: Loss, layout: tuple[int, int] = (2, 4), **options: Any) -> None:
    """Hold a loss and its gradient on a layout to those of one device outside of strategies."""
    params, strategy = place(make(layout), PARAMS), make(layout)
    found, grads = run(strategy, loss, params, X, **options)
    np.testing.assert_allclose(found[0], jax.jit(loss)(PARAMS, X), rtol=1e-5)
    assert largest_error(grads, jax.jit(jax.grad(loss))(PARAMS, X)) <= 2e-6


def _plain(params: Params, x: Any) -> Any:
    return loss_of(params, x)[0]


def _in_two_layers(params: Params, x: Any) -> Any:
    def layer(x: Any, _: Any) -> Any:
        y, _ = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
        return x + y, None

    return (jax.lax.scan(layer, x, None, length=2)[0] ** 2).mean()


def _mapped(params: Params, x: Any) -> Any:
    def of_row(x: Any) -> Any:
        return loss_of(params, x, group=6)[0]

    return jax.vmap(of_row)(x).mean()


def _twice(params: Params, x: Any) -> Any:
    """A derivative of the gradient, which is linear in the rows of replicas."""
    ones = jax.tree.map(jnp.ones_like, params)
    _, found = jax.jvp(lambda p: jax.grad(_plain)(p, x), (params,), (ones,))
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(found))


def _scaled(params: Params, x: Any) -> Any:
    """The expert uses another array of the step."""
    scale = params["router"].sum() / 10

    def scaled(w: Params, rows: Any) -> Any:
        return jnp.tanh(rows @ w["up"] * scale) @ w["down"]

    y, _ = nn.experts(scaled, params["router"], weights_of(params), x, top_k=2)
    return (y**2).mean()


AROUND: dict[str, Loss] = {
    "jit": jax.jit(_plain),
    "checkpoint": jax.checkpoint(_plain),
    "scan": _in_two_layers,
    "vmap": _mapped,
    "second derivative": _twice,
    "other arrays": _scaled,
    "other arrays, checkpoint": jax.checkpoint(_scaled),
}


@pytest.mark.parametrize("name", AROUND)
def test_functions_of_jax_around_a_call_change_no_number(name: str) -> None:
    _check(AROUND[name])


@pytest.mark.parametrize("layout", [(4, 1), (2, 4)])
def test_steps_op_by_op_compute_the_same(layout: tuple[int, int]) -> None:
    _check(_plain, layout, eagerly=True)


def test_an_expert_uses_other_arrays_op_by_op() -> None:
    _check(_scaled, eagerly=True)


def test_outside_of_steps_and_on_one_device_it_is_the_same() -> None:
    wanted, _ = run_oracle(PARAMS, X)
    np.testing.assert_allclose(loss_of(PARAMS, X)[0], wanted[0], rtol=1e-5)
    with make((2, 4)).scope():
        np.testing.assert_allclose(loss_of(PARAMS, X)[0], wanted[0], rtol=1e-5)
    for strategy in (jaxdist.OneDeviceStrategy("cpu:3"), jaxdist.MirroredStrategy()):
        found, _ = run(strategy, loss_of, PARAMS, X)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("loss", [_plain, _scaled], ids=["plain", "other arrays"])
def test_a_mesh_with_explicit_axes_computes_the_same(loss: Loss) -> None:
    strategy = make((2, 4), AxisType.Explicit)
    found, grads = run(strategy, loss, place(strategy, PARAMS), X)
    np.testing.assert_allclose(found[0], loss(PARAMS, X), rtol=1e-5)
    assert largest_error(grads, jax.grad(loss)(PARAMS, X)) <= 2e-6


@pytest.mark.parametrize("loss", [_plain, _scaled], ids=["plain", "other arrays"])
@pytest.mark.parametrize("spec", [jax.P("experts"), jax.P(None, None, "model")])
def test_tokens_whose_type_is_split_keep_their_type(spec: Any, loss: Loss) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "experts", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))

    def typed(params: Params, x: Any) -> Any:
        x = jax.sharding.reshard(x * 1, spec)
        y, _ = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
        assert jax.typeof(y).sharding.spec == jax.typeof(x).sharding.spec
        return loss(params, x)

    found, grads = run(strategy, typed, PARAMS, X)
    np.testing.assert_allclose(found[0], loss(PARAMS, X), rtol=1e-5)
    assert largest_error(grads, jax.grad(loss)(PARAMS, X)) <= 2e-6


@pytest.mark.parametrize(
    ("shape", "names", "replica_axes"),
    [
        ((2, 2, 2), ("data", "experts", "model"), ("data",)),
        ((4, 2), ("experts", "data"), ("data",)),
        ((2, 2, 2), ("slice", "data", "experts"), ("slice", "data")),
        ((2, 4), ("data", "model"), ("data",)),
    ],
)
def test_the_axis_may_be_anywhere_in_the_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], replica_axes: tuple[str, ...]
) -> None:
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=replica_axes)
    found, grads = run(strategy, _plain, place(strategy, PARAMS), X)
    wanted, of_oracle = run_oracle(PARAMS, X)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert largest_error(grads, of_oracle) <= 1e-6


def test_experts_inside_of_stages_that_run_other_operations() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "stage", "experts"), axis_types=(AxisType.Auto,) * 3)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    two = jax.tree.map(lambda p: np.stack([p, 0.7 * p]), PARAMS)

    def layer(params: Params, x: Any) -> Any:
        return x + nn.experts(expert, params["router"], weights_of(params), x, top_k=2)[0]

    def pick(params: Params, i: int) -> Params:
        return jax.tree.map(lambda p: p[i], params)

    def one_after_the_other(params: Params, x: Any) -> Any:
        return (layer(pick(params, 1), layer(pick(params, 0), x)) ** 2).mean()

    def in_stages(params: Params, x: Any) -> Any:
        def run_stage(params: Params, x: Any) -> Any:
            own = jax.lax.axis_index("stage")

            def tick(x: Any, now: Any) -> Any:
                x = jax.lax.cond(now == own, lambda x: layer(pick(params, 0), x), lambda x: x, x)
                return jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)]), None

            return jax.lax.scan(tick, x, jnp.arange(2))[0][None]

        of_stage = jax.P("stage")
        stages = jax.shard_map(
            run_stage,
            in_specs=(of_stage, jax.P()),
            out_specs=of_stage,
            axis_names={"stage"},
            check_vma=False,
        )
        return (stages(params, x)[0] ** 2).mean()

    found, grads = run(strategy, in_stages, two, X)
    wanted, of_one = jax.jit(jax.value_and_grad(one_after_the_other))(two, X)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)
    assert largest_error(grads, of_one) <= 1e-6


def test_a_gradient_of_a_gradient_and_models_side_by_side_are_those_of_one_device() -> None:
    def norm(params: Params, x: Any) -> Any:
        grads = jax.grad(_plain)(params, x)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    several = jax.vmap(jax.value_and_grad(_plain), in_axes=(0, None))
    models = jax.tree.map(lambda p: np.stack([p, p / 2]), PARAMS)
    for fn, params in ((jax.grad(norm), PARAMS), (several, models)):
        found = make((1, 4)).run(fn, (params, X))
        assert largest_error(found, jax.jit(fn)(params, X)) <= 2e-6


RULES = {
    "fsdp": partition.fsdp(min_bytes=0),
    "fsdp and experts": partition.Rules(
        [("up", partition.Shard(1, split=0, pad=True)), ("down", partition.Shard(2, split=0))],
        otherwise=partition.Shard(),
    ),
    "pieces of experts": partition.Rules([], otherwise=partition.Shard(0, pad=True)),
    "whole": partition.replicated(),
}


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "op by op"])
@pytest.mark.parametrize("rules", RULES)
def test_parameters_in_pieces_are_gathered(rules: str, eagerly: bool) -> None:
    wanted, of_oracle = run_oracle(PARAMS, X)
    strategy = make((2, 4))
    params = partition.place(strategy, PARAMS, RULES[rules])
    found, grads = run(strategy, loss_of, params, X, eagerly=eagerly)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert largest_error(grads, of_oracle) <= 1e-6


def test_variables_are_read_as_the_step_has_changed_them() -> None:
    strategy = make((2, 4))
    with strategy.scope():
        scale = jaxdist.Variable(np.ones((EXPERTS, 1, 1), np.float32))

    def step(x: Any) -> Any:
        scale.assign(jnp.full((EXPERTS, 1, 1), 3.0))
        return nn.experts(lambda w, rows: rows * w, PARAMS["router"], scale, x, top_k=8)[0]

    y = strategy.run(step, (X,))
    np.testing.assert_allclose(y, 3 * X, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("loss", [_plain, _scaled], ids=["plain", "other arrays"])
def test_narrow_dtypes_are_kept_and_routed_in_float32(dtype: str, loss: Loss) -> None:
    def narrow(params: Params, x: Any) -> Any:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        return loss(params, x.astype(dtype)).astype(jnp.float32)

    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    y, aux = nn.experts(expert, params["router"], weights_of(params), X.astype(dtype), top_k=2)
    assert (y.dtype, [a.dtype for a in aux]) == (dtype, [jnp.float32] * 2)
    wanted, in_float32 = jax.value_and_grad(loss)(PARAMS, X)
    for layout in ((8, 1), (2, 4)):
        strategy = make(layout)
        found, grads = run(strategy, narrow, place(strategy, PARAMS), X)
        np.testing.assert_allclose(found[0], wanted, rtol=0.01)
        assert largest_error(grads, in_float32) <= 0.03


# Functions with an infinite derivative at a row of zeros.
def _over_norm(w: Params, rows: Any) -> Any:
    return expert(w, rows / jnp.linalg.norm(rows, axis=-1, keepdims=True))


def _of_root(w: Params, rows: Any) -> Any:
    return expert(w, jnp.sqrt(jnp.abs(rows)))


@pytest.mark.parametrize("function", [_over_norm, _of_root])
@pytest.mark.parametrize("capacity", [1.25, None])
@pytest.mark.parametrize("layout", [(8, 1), (2, 4)])
def test_slots_that_no_token_takes_make_no_gradient_nan(
    layout: tuple[int, int], capacity: float | None, function: Any
) -> None:
    # One expert is never chosen, and has no token at all.
    params = {**PARAMS, "router": PARAMS["router"].copy()}
    x = np.abs(X)
    params["router"][:, 3] = -50

    def loss(params: Params, x: Any) -> Any:
        y, _ = nn.experts(
            function, params["router"], weights_of(params), x, top_k=2, capacity=capacity
        )
        return (y**2).mean()

    strategy = make(layout)
    found, grads = run(strategy, loss, place(strategy, params), x)
    assert np.isfinite(found).all()
    assert all(np.isfinite(g).all() for g in grads.values())
    assert not grads["up"][3].any()
    assert grads["up"][2].any()


def test_a_token_that_is_nan_reaches_no_other_token() -> None:
    x = X.copy()
    x[0, 5] = np.nan
    strategy = make((2, 4))

    def step(params: Params, x: Any) -> Any:
        return nn.experts(expert, params["router"], weights_of(params), x, top_k=2, capacity=None)[
            0
        ]

    rows = jax.device_put(x, strategy.per_replica_sharding)
    y = strategy.gather(strategy.run(step, (place(strategy, PARAMS), rows)), axis=0)
    wanted, _ = nn.experts(expert, PARAMS["router"], weights_of(PARAMS), X, top_k=2, capacity=None)
    is_other = np.ones(X.shape[:2], bool)
    is_other[0, 5] = False
    assert np.isnan(np.asarray(y)[0, 5]).all()
    np.testing.assert_allclose(
        np.asarray(y)[is_other], np.asarray(wanted)[is_other], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rows", [(5, 3), (8, 0)])
def test_uneven_replicas_have_losses_of_their_own_rows(rows: tuple[int, int]) -> None:
    values = jaxdist.PerReplica([X[: rows[0]], X[rows[0] :]])

    def step(params: Params, x: Any) -> Any:
        y, (balance, dropped) = nn.experts(expert, params["router"], weights_of(params), x, top_k=2)
        share = x.shape[0] / 8
        context = get_replica_context()
        return context.all_reduce("sum", ((y**2).sum(), balance * share, dropped * share))

    found = make((2, 1)).run(step, (PARAMS, values))
    y, aux = nn.experts(expert, PARAMS["router"], weights_of(PARAMS), X, top_k=2)
    np.testing.assert_allclose(found, [(y**2).sum(), *aux], rtol=1e-5)
