"""What the processes of a job run for the tests of what survivors save."""

import os
import signal
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.errors import OtherProcessError
from jaxdist.training import Checkpoints
from tests.checkpoints.rows import put_rows

_SIZE = 64


def _step(model: Any, optimizer: Any, x: Any) -> Any:
    context = jaxdist.get_replica_context()
    assert context is not None
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, context.all_reduce("mean", grads))
    return context.all_reduce("mean", loss)


def make_objects() -> tuple[Any, Any]:
    """Return an untrained model and its optimizer."""
    model = nnx.Linear(_SIZE, _SIZE, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)


def make_batch(strategy: jaxdist.Strategy) -> Any:
    """Return rows for each of 4 replicas."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.full((2, _SIZE), 1 + c.replica_id_in_sync_group, "float32")
    )


def train_alone(steps: int) -> np.ndarray:
    """Return the kernel after some steps on 4 devices of one process."""
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        model, optimizer = make_objects()
    batch = make_batch(strategy)
    for _ in range(steps):
        strategy.run(_step, (model, optimizer, batch))
    return np.asarray(model.kernel[...])


def train_until_killed(folder: str, victim: int, at: int, how: str) -> dict[str, Any]:
    """Train; one process ends before step `at`. Return what the other says."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = make_objects()
    if how == "fsdp":
        jaxdist.partition.place(strategy, (model, optimizer), jaxdist.partition.fsdp(min_bytes=0))
    batch, done = make_batch(strategy), 0
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(done, (model, optimizer))
        state: Any = (model, optimizer)
        if how == "rows":
            state = put_rows(np.ones((8, 2)), strategy.per_replica_sharding)
        checkpoints.on_failure(lambda: (done, state, {"how": how}))
        try:
            for _ in range(60):
                if jax.process_index() == victim and done == at:
                    # Steps that are complete in this process are complete in the other.
                    jax.block_until_ready(nnx.state(model))
                    os.kill(os.getpid(), signal.SIGKILL)
                strategy.run(_step, (model, optimizer, batch))
                done += 1
        except OtherProcessError as error:
            return {"done": done, "processes": error.processes, "message": str(error)}
    return {"done": done}
