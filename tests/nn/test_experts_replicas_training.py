"""Training with experts over an axis of replicas: the same losses as on one device."""

import pathlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import get_replica_context, nn, partition
from jaxdist.testing import launch
from jaxdist.training import Checkpoints
from tests.nn.experts_oracle import (
    EXPERTS,
    WIDTH,
    Params,
    loss_of,
    make_mesh,
    make_params,
    make_rows,
    place_pieces,
)
from tests.nn.test_experts_replicas import IDS, MESHES, Mesh

PARAMS, X = make_params(), make_rows()


def _first(params: Params, x: Any, axis: str) -> Any:
    return loss_of(params, x, axis=axis)[0]


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
        loss, grads = jax.value_and_grad(_first)(params, x, axis)
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


@pytest.mark.parametrize("mesh", MESHES[3:7], ids=IDS[3:7])
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
