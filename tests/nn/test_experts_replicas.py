"""Experts over an axis of replicas: the same drops, losses and gradients as on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxdist
from jaxdist import get_replica_context, nn, partition
from jaxdist.training import accumulate_gradients
from tests.nn.experts_oracle import (
    Params,
    expert,
    largest_error,
    loss_of,
    make_mesh,
    make_params,
    make_rows,
    place_pieces,
    run,
    run_oracle,
    weights_of,
)
from tests.tables import examples

PARAMS, X = make_params(), make_rows()
Loss = Callable[[Params, Any], Any]
# Shape, names of axes, and those of replicas.
Mesh = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]
DATA = ("data",)
MESHES: list[Mesh] = [
    ((1,), DATA, DATA),
    ((2,), DATA, DATA),
    ((4,), DATA, DATA),
    ((8,), DATA, DATA),
    ((2, 4), ("slice", "data"), ("slice", "data")),
    ((4, 2), ("data", "slice"), ("slice", "data")),
    ((4, 2), ("data", "model"), DATA),
    ((2, 2, 2), ("slice", "data", "model"), ("slice", "data")),
    ((1, 4), ("slice", "data"), ("slice", "data")),
    ((4, 1), ("slice", "data"), ("slice", "data")),
]
IDS = [f"{dict(zip(names, shape, strict=True))}" for shape, names, _ in MESHES]


def _loss(params: Params, x: Any, **options: Any) -> Any:
    return loss_of(params, x, axis="data", **options)


def _first(params: Params, x: Any, **options: Any) -> Any:
    return loss_of(params, x, **{"axis": "data", **options})[0]


def _check_oracle(mesh: Mesh, *, eagerly: bool) -> None:
    wanted, of_oracle = run_oracle(PARAMS, X)
    strategy = make_mesh(*mesh)
    found, grads = run(strategy, _loss, place_pieces(strategy, PARAMS), X, eagerly=eagerly)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert wanted[2] > 0
    assert largest_error(grads, of_oracle) <= 1e-6


@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
def test_losses_drops_and_gradients_are_those_of_explicit_queues(mesh: Mesh) -> None:
    _check_oracle(mesh, eagerly=False)


@pytest.mark.parametrize("mesh", [MESHES[1], MESHES[4], MESHES[6]])
def test_steps_op_by_op_compute_the_same(mesh: Mesh) -> None:
    _check_oracle(mesh, eagerly=True)


def test_drops_are_equal_to_the_bit_on_each_number_of_replicas() -> None:
    found = set()
    for mesh in MESHES:
        strategy = make_mesh(*mesh)
        results, _ = run(strategy, _loss, place_pieces(strategy, PARAMS), make_rows(tokens=16))
        found.add(results[2])
    assert len(found) == 1
    assert found.pop() > 0.01


@settings(max_examples=examples(6, 100))
@given(data=st.data())
def test_any_sizes_are_those_of_explicit_queues(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    strategy = make_mesh(*mesh)
    replicas = dict(zip(*mesh[1::-1], strict=True))
    experts = replicas["data"] * data.draw(st.integers(1, 3))
    group = data.draw(st.integers(1, 5))
    tokens = group * data.draw(st.integers(1, 3))
    rows = strategy.num_replicas_in_sync * data.draw(st.integers(1, 2))
    options = {
        "top_k": data.draw(st.integers(1, experts)),
        "group": group,
        "capacity": data.draw(st.none() | st.sampled_from([0.01, 0.3, 1, 1.1, 2.5, 100])),
    }
    seed = data.draw(st.integers(0, 1000))
    params, x = make_params(seed, experts), make_rows(rows, tokens, seed)
    placed = place_pieces(strategy, params)
    found, grads = run(strategy, lambda p, x: _loss(p, x, **options), placed, x)
    wanted, of_oracle = run_oracle(params, x, **options)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, of_oracle[name], rtol=1e-5, atol=1e-6)


def _in_two_layers(params: Params, x: Any) -> Any:
    def layer(x: Any, _: Any) -> Any:
        w = weights_of(params)
        return x + nn.experts(expert, params["router"], w, x, top_k=2, axis="data")[0], None

    return (jax.lax.scan(layer, x, None, length=2)[0] ** 2).mean()


def _mapped(params: Params, x: Any) -> Any:
    return jax.vmap(lambda x: _first(params, x, group=6))(x).mean()


def _in_a_branch(params: Params, x: Any) -> Any:
    is_large = jnp.sum(params["router"] ** 2) > 0
    return jax.lax.cond(is_large, lambda: _first(params, x), lambda: 0.0)


def _reduced_before(params: Params, x: Any) -> Any:
    return get_replica_context().all_reduce("mean", _first(params, x))


def _in_bfloat16(params: Params, x: Any) -> Any:
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return _first(narrow, x.astype(jnp.bfloat16))


AROUND: dict[str, tuple[Loss, float]] = {
    "jit": (jax.jit(_first), 1e-6),
    "checkpoint": (jax.checkpoint(_first), 1e-6),
    "scan": (_in_two_layers, 1e-6),
    "vmap": (_mapped, 1e-6),
    "branch": (_in_a_branch, 1e-6),
    "loss that is reduced before": (_reduced_before, 1e-6),
    "bfloat16": (_in_bfloat16, 0.01),
}


def _check(
    loss: Loss, strategy: jaxdist.Strategy, placed: Any, params: Any = PARAMS, error: float = 1e-6
) -> None:
    """Hold a loss and its gradient to those of one device outside of strategies."""
    found, grads = run(strategy, loss, placed, X)
    wanted, of_one = jax.jit(jax.value_and_grad(loss))(params, X)
    np.testing.assert_allclose(found[0], wanted, rtol=max(1e-5, error / 10))
    assert largest_error(grads, of_one) <= error


@pytest.mark.parametrize("name", AROUND)
def test_functions_of_jax_around_a_call_change_no_number(name: str) -> None:
    loss, error = AROUND[name]
    strategy = make_mesh((4,))
    _check(loss, strategy, place_pieces(strategy, PARAMS), error=error)


def test_a_gradient_of_a_gradient_is_that_of_one_device() -> None:
    strategy = make_mesh((2, 2), ("slice", "data"), ("slice", "data"))

    def norm(params: Params, x: Any, mean: Any) -> Any:
        grads = mean(jax.grad(_first)(params, x))
        return sum(jnp.sum(partition.gather(g) ** 2) for g in grads.values())

    def step(params: Params, x: Any) -> Any:
        def mean(tree: Any) -> Any:
            return get_replica_context().all_reduce("mean", tree)

        return mean(jax.grad(norm)(params, x, mean))

    rows = jax.device_put(X, strategy.per_replica_sharding)
    found = partition.gather(strategy.run(step, (place_pieces(strategy, PARAMS), rows)))
    wanted = jax.jit(jax.grad(lambda p, x: norm(p, x, lambda tree: tree)))(PARAMS, X)
    assert largest_error(jax.tree.map(np.asarray, found), wanted) <= 2e-6


def test_a_gradient_from_outside_of_the_step_is_that_of_one_device() -> None:
    wanted = jax.jit(jax.grad(_first))(PARAMS, X)
    for mesh in (MESHES[2], MESHES[4]):
        strategy = make_mesh(*mesh)
        rows = jax.device_put(X, strategy.per_replica_sharding)
        placed = place_pieces(strategy, PARAMS)
        grads = jax.grad(lambda p, s=strategy, x=rows: s.run(_reduced_before, (p, x)))(placed)
        assert largest_error(jax.tree.map(np.asarray, partition.gather(grads)), wanted) <= 1e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mesh", [MESHES[2], MESHES[6]], ids=[IDS[2], IDS[6]])
def test_a_mesh_with_explicit_axes_and_bfloat16_compute_the_same(
    mesh: Mesh, kind: AxisType
) -> None:
    strategy = make_mesh(*mesh, kind)
    placed = place_pieces(strategy, PARAMS)
    _check(_first, strategy, placed)
    _check(_in_bfloat16, strategy, placed, error=0.01)


def test_matrices_of_experts_may_be_split_over_the_devices_of_a_replica() -> None:
    for kind in (AxisType.Auto, AxisType.Explicit):
        strategy = make_mesh((2, 4), ("data", "model"), DATA, kind)
        up, down = (partition.Shard(0, split=dim) for dim in (2, 1))
        rules = partition.Rules([("up", up), ("down", down)], otherwise=partition.Replicate())
        wide = {**PARAMS, **{k: np.tile(PARAMS[k], n) for k, n in _WIDER.items()}}
        _check(_first, strategy, partition.place(strategy, wide, rules), wide)


_WIDER: dict[str, tuple[int, ...]] = {"up": (1, 1, 2), "down": (1, 2, 1)}


def test_other_parameters_may_be_in_pieces_too() -> None:
    for mesh in (MESHES[2], MESHES[4]):
        strategy = make_mesh(*mesh)
        placed = place_pieces(strategy, PARAMS, partition.Shard(pad=True))
        assert isinstance(placed["router"], jaxdist.Sharded)
        _check(_first, strategy, placed)


_STACK = jax.tree.map(lambda p: np.stack([p, 0.7 * p]), PARAMS)


def test_a_scan_over_stacked_layers_and_models_side_by_side_are_those_of_one_device() -> None:
    def layer(x: Any, params: Params) -> Any:
        w = weights_of(params)
        return x + nn.experts(expert, params["router"], w, x, top_k=2, axis="data")[0], None

    def layers(params: Params, x: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()

    def models(params: Params, x: Any) -> Any:
        return jax.vmap(_first, in_axes=(0, None))(params, x).sum()

    strategy = make_mesh((4,))
    placed = place_pieces(strategy, _STACK, dim=1)
    for loss in (layers, models):
        _check(loss, strategy, placed, _STACK)


def test_a_pipeline_without_stages_runs_experts_of_replicas() -> None:
    def layer(params: Params, x: Any) -> Any:
        w = weights_of(params)
        return x + nn.experts(expert, params["router"], w, x, top_k=2, axis="data")[0]

    def loss(params: Params, x: Any) -> Any:
        return nn.pipeline_loss(
            lambda _, rows: rows,
            layer,
            lambda _, x, rows: (x**2).mean(),
            ((), params, ()),
            x,
            micro_batches=2,
        )

    strategy = make_mesh((4,))
    _check(loss, strategy, place_pieces(strategy, _STACK, dim=1), _STACK)


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    strategy = make_mesh((4,))

    def step(params: Params, x: Any) -> Any:
        grads = accumulate_gradients(jax.grad(_first), 2)(params, x)
        return get_replica_context().all_reduce("mean", grads)

    rows = jax.device_put(X, strategy.per_replica_sharding)
    grads = partition.gather(strategy.run(step, (place_pieces(strategy, PARAMS), rows)))
    _, of_oracle = run_oracle(PARAMS, X)
    assert largest_error(jax.tree.map(np.asarray, grads), of_oracle) <= 1e-6


@pytest.mark.parametrize("others", [partition.Replicate(), partition.Shard(pad=True)])
@pytest.mark.parametrize("rows", [(5, 3), (8, 0)])
def test_uneven_replicas_have_the_losses_and_gradients_of_one_device(
    rows: tuple[int, int], others: Any
) -> None:
    values = jaxdist.PerReplica([X[: rows[0]], X[rows[0] :]])

    def loss(params: Params, x: Any) -> Any:
        w = weights_of(params)
        y, (balance, dropped) = nn.experts(expert, params["router"], w, x, top_k=2, axis="data")
        share = x.shape[0] / 8
        return (y**2).sum() + balance * share, dropped * share

    def step(params: Params, x: Any) -> Any:
        found = jax.value_and_grad(loss, has_aux=True)(params, x)
        return get_replica_context().all_reduce("sum", found)

    strategy = make_mesh((2,))
    found, grads = strategy.run(step, (place_pieces(strategy, PARAMS, others), values))
    wanted, of_one = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert largest_error(jax.tree.map(np.asarray, partition.gather(grads)), of_one) <= 1e-6


def test_a_replica_without_rows_reaches_the_gradient_of_a_balance_loss() -> None:
    def loss(params: Params, x: Any) -> Any:
        return _loss(params, x)[1] * x.shape[0] / 8

    def step(params: Params, x: Any) -> Any:
        return get_replica_context().all_reduce("sum", jax.grad(loss)(params, x))

    strategy = make_mesh((2,))
    placed = place_pieces(strategy, PARAMS, partition.Shard(pad=True))
    grads = strategy.run(step, (placed, jaxdist.PerReplica([X, X[8:]])))
    wanted = jax.jit(jax.grad(loss))(PARAMS, X)["router"]
    np.testing.assert_allclose(grads["router"], wanted, rtol=1e-5, atol=1e-7)
    assert np.abs(wanted).max() > 0.001


def test_virtual_replicas_compute_all_experts() -> None:
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), DATA, axis_types=(AxisType.Auto,), devices=devices)
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=DATA, deterministic=True)
    found, grads = run(strategy, _loss, PARAMS, X)
    wanted, of_oracle = run_oracle(PARAMS, X)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert largest_error(grads, of_oracle) <= 1e-6
