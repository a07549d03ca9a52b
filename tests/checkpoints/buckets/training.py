"""What the processes of a job run for the tests of training with a bucket."""

import os
import signal
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist.training import Checkpoints
from tests.checkpoints.rows import put_rows

STEPS = 12


def train(folder: str, kill_after: int | None) -> dict[str, Any]:
    """Train from the newest checkpoint to step `STEPS`, and save every third step.

    Args:
        folder: The folder of the checkpoints.
        kill_after: The step after which the last process is killed.
    """
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(STEPS, 8, 6)).astype(np.float32)
    ys = rng.normal(size=(STEPS, 8, 4)).astype(np.float32)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        replica = jaxdist.get_replica_context()
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, replica.all_reduce("mean", grads))
        return replica.all_reduce("mean", loss)

    losses = {}
    whole = put_rows(np.zeros((8, 3), np.float32), strategy.per_replica_sharding)
    with Checkpoints(folder, keep=2) as checkpoints:
        restored = checkpoints.restore({"model": model, "optimizer": optimizer, "whole": whole})
        first = 0
        if restored is not None:
            first, whole = restored.step, restored.state["whole"]
        for number in range(first, STEPS):
            x, y = (put_rows(a[number], strategy.per_replica_sharding) for a in (xs, ys))
            losses[number] = float(strategy.run(step, (model, optimizer, x, y)))
            whole = whole + number
            if (number + 1) % 3 == 0:
                state = {"model": model, "optimizer": optimizer, "whole": whole}
                checkpoints.save(number + 1, state, {"losses": len(losses)})
            if number + 1 == kill_after and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    own = {float(v) for s in whole.addressable_shards for v in np.ravel(s.data)}
    return {"first": first, "losses": losses, "whole": own}
