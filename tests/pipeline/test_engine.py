"""Losses and gradients of pipelines, against those of the ordinary loop on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist._pipeline import run_pipeline, run_plain
from tests.pipeline.models import (
    FNS,
    chunked,
    difference,
    loop_loss,
    make_batch,
    make_parts,
    make_strategy,
    place,
)
from tests.tables import sampled

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("1f1b", 2), ("zero_bubble", 2)]
MESHES = [
    {"data": 2, "stage": 4},
    {"data": 1, "stage": 8},
    {"data": 4, "stage": 2},
    {"data": 2, "stage": 2, "model": 2},
]
ROWS = [
    (mesh, schedule, chunks)
    for mesh in MESHES
    for schedule, chunks in SCHEDULES
    if 8 % (mesh["stage"] * chunks) == 0
]


def _name(row: Any) -> str:
    mesh, schedule, chunks = row
    return f"{'x'.join(map(str, mesh.values()))}-{schedule}-{chunks}"


@functools.cache
def _on_one_device(micro_batches: int) -> Any:
    batch = make_batch(micro_batches, 8)
    return jax.jit(jax.value_and_grad(lambda p: loop_loss(FNS, p, batch)))(make_parts())


def _run(mesh: dict[str, int], schedule: str, chunks: int, micro_batches: int) -> Any:
    """The loss and gradients, and the loss without gradients."""
    strategy = make_strategy(**mesh)
    context = jaxdist.get_replica_context
    call = functools.partial(
        run_pipeline, FNS, axis="stage", stages=mesh["stage"], schedule=schedule, chunks=chunks
    )
    placed = place(strategy, make_parts(), make_batch(micro_batches, 8), chunks)

    def step(parts: Any, batch: Any) -> Any:
        found = jax.value_and_grad(lambda p: call(p, batch))(parts)
        return context().all_reduce("mean", (found, call(parts, batch)))

    (loss, grads), alone = strategy.run(step, placed)
    return (loss, grads), alone


@pytest.mark.parametrize("row", sampled(ROWS, 8, name=_name))
def test_gradients_are_those_of_one_device(row: Any) -> None:
    found, alone = _run(*row, micro_batches=8)
    wanted = _on_one_device(8)
    assert difference(found, wanted) < 1e-6
    assert difference(alone, wanted[0]) < 1e-6


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches"),
    [("1f1b", 2, 6), ("zero_bubble", 2, 5), ("zero_bubble", 1, 3), ("gpipe", 2, 1)],
)
def test_any_number_of_micro_batches_is_right(
    schedule: str, chunks: int, micro_batches: int
) -> None:
    found, alone = _run({"data": 2, "stage": 4}, schedule, chunks, micro_batches)
    assert difference(found, _on_one_device(micro_batches)) < 1e-6
    assert difference(alone, _on_one_device(micro_batches)[0]) < 1e-6


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_plain_path_has_the_numbers_of_the_loop(chunks: int) -> None:
    batch = make_batch(8, 8)
    parts = chunked(make_parts(), chunks)
    loss, grads = jax.value_and_grad(lambda p: run_plain(FNS, p, batch, chunks=chunks))(parts)
    assert difference((loss, grads), _on_one_device(8)) < 1e-6
    assert float(run_plain(FNS, parts, batch, chunks=chunks)) == float(loss)


def _train(step: Any, parts: Any) -> list[float]:
    optimizer = optax.adam(1e-2)
    state = optimizer.init(parts)
    losses = []
    for _ in range(50):
        loss, grads = step(parts)
        updates, state = optimizer.update(grads, state, parts)
        parts = optax.apply_updates(parts, updates)
        losses.append(float(loss))
    return losses


@functools.cache
def _losses_on_one_device() -> list[float]:
    batch = make_batch(8, 8)
    step = jax.jit(jax.value_and_grad(lambda p: loop_loss(FNS, p, batch)))
    return _train(step, jax.tree.map(jnp.asarray, make_parts()))


@pytest.mark.parametrize("row", sampled(ROWS, 2, name=_name))
def test_50_losses_of_adam_are_those_of_one_device(row: Any) -> None:
    mesh, schedule, chunks = row
    strategy = make_strategy(**mesh)
    parts, batch = place(strategy, make_parts(), make_batch(8, 8), chunks)

    def step(parts: Any, batch: Any) -> Any:
        def loss_of(parts: Any) -> Any:
            return run_pipeline(
                FNS,
                parts,
                batch,
                axis="stage",
                stages=mesh["stage"],
                schedule=schedule,
                chunks=chunks,
            )

        context = jaxdist.get_replica_context()
        return context.all_reduce("mean", jax.value_and_grad(loss_of)(parts))

    losses = _train(lambda parts: strategy.run(step, (parts, batch)), parts)
    wanted = _losses_on_one_device()
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
