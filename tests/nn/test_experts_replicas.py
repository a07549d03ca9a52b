"""Experts over an axis of replicas: the same drops, losses and gradients as on one device."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxdist
from jaxdist import get_replica_context, nn, partition
from jaxdist.testing import launch
from jaxdist.training import Checkpoints, accumulate_gradients
from tests.nn.experts_oracle import (
    EXPERTS,
    WIDTH,
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
_IDS = [f"{dict(zip(names, shape, strict=True))}" for shape, names, _ in MESHES]


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


@pytest.mark.parametrize("mesh", MESHES, ids=_IDS)
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
@pytest.mark.parametrize("mesh", [MESHES[2], MESHES[6]], ids=[_IDS[2], _IDS[6]])
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


def _train(
    strategy: jaxdist.Strategy,
    steps: range = range(5),
    folder: pathlib.Path | None = None,
    axis: str = "data",
) -> list[float]:
    """Losses of Adam; with a folder they go on from its checkpoint, and are saved there."""
    tx = optax.adam(1e-2)
    params = place_pieces(strategy, PARAMS)
    state = tx.init(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        context = get_replica_context()
        loss, grads = jax.value_and_grad(_first)(params, x, axis=axis)
        updates, state = tx.update(context.all_reduce("mean", grads), state, params)
        return optax.apply_updates(params, updates), state, context.all_reduce("mean", loss)

    if folder is not None and any(folder.iterdir()):
        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore((params, state))
        assert restored is not None
        params, state = restored.state
    losses = []
    for i in steps:
        x = strategy.experimental_distribute_values_from_function(
            lambda context, i=i: np.split(make_rows(seed=i), context.num_replicas_in_sync)[
                context.replica_id_in_sync_group
            ]
        )
        params, state, loss = strategy.run(step, (params, state, x))
        losses.append(float(loss))
    assert isinstance(params["up"], jaxdist.Sharded) == (strategy.num_replicas_in_sync > 1)
    if folder is not None:
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(steps.stop, (params, state))
    return losses


@pytest.mark.parametrize("mesh", MESHES[3:7], ids=_IDS[3:7])
def test_five_losses_of_adam_are_those_of_one_device(mesh: Mesh) -> None:
    one = _train(make_mesh((1,)))
    np.testing.assert_allclose(_train(make_mesh(*mesh)), one, rtol=1e-6)
    assert one[-1] < one[0]


def test_a_checkpoint_is_restored_on_another_number_of_replicas(tmp_path: pathlib.Path) -> None:
    one = _train(make_mesh((1,)), range(6))
    strategies = (make_mesh((8,)), make_mesh((2,)), make_mesh(*MESHES[4]))
    for i, strategy in enumerate(strategies):
        losses = _train(strategy, range(2 * i, 2 * i + 2), tmp_path)
        np.testing.assert_allclose(losses, one[2 * i : 2 * i + 2], rtol=1e-6)


def _train_on_processes() -> tuple[int, list[float]]:
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    return strategy.num_replicas_in_sync, _train(strategy, axis="replica")


def test_two_processes_with_four_replicas_each_have_the_losses_of_one_device() -> None:
    one = _train(make_mesh((1,)))
    found = launch(_train_on_processes, 2, devices_per_process=4, timeout_seconds=200)
    assert [count for count, _ in found] == [8, 8]
    for _, losses in found:
        np.testing.assert_allclose(losses, one, rtol=1e-6)


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
        def of_one(layer: nnx.Linear, rows: Any) -> Any:
            return nnx.relu(layer(rows))

        return nn.experts(of_one, self.router, self.experts, x, top_k=2, axis="data")


@pytest.mark.parametrize("others", [partition.Replicate(), partition.Shard(pad=True)])
def test_stacked_modules_of_nnx_are_experts_of_replicas(others: Any) -> None:
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            y, (balance, _) = model(x)
            return ((y - 1) ** 2).mean() + 0.01 * balance

        context = get_replica_context()
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, context.all_reduce("mean", grads))
        return context.all_reduce("mean", loss)

    losses = []
    for count in (1, 8, 2):
        strategy = make_mesh((count,))
        model = Experts(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        rules = partition.Rules([("experts/*", partition.Shard(0))], otherwise=others)
        model, optimizer = partition.place(strategy, (model, optimizer), rules)
        rows = jax.device_put(X, strategy.per_replica_sharding)
        losses.append([float(strategy.run(step, (model, optimizer, rows))) for _ in range(4)])
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
