"""Trains on the handwritten digits and counts each example; started again after each kill.

The counts are part of the state, so an example that is taken twice or never is seen at the end.
"""

import itertools
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

EPOCHS, BATCH = 12, 64


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and their numbers."""
    from sklearn.datasets import load_digits

    # The types of scikit-learn are those of another call.
    found: Any = load_digits(return_X_y=True)
    x, y = found
    return (x / 16).astype("float32"), y.astype("int32")


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Take one batch; the last of an epoch has fewer rows."""
    x, y, ids = batch
    replica = jaxdist.get_replica_context()
    assert replica is not None
    rows = replica.all_reduce("sum", x.shape[0])

    def find_loss(w: Any) -> Any:
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logits, y[:, None], axis=1).sum() / rows

    loss, grads = jax.value_and_grad(find_loss)(state["w"])
    own = jnp.zeros_like(state["counts"]).at[ids].add(1)
    loss, grads, seen = replica.all_reduce("sum", (loss, grads, own))
    return {"w": state["w"] - 0.5 * grads, "counts": state["counts"] + seen}, loss


def train(strategy: jaxdist.Strategy, folder: pathlib.Path | None) -> dict[str, Any]:
    """Train to the end, from the newest checkpoint."""
    x, y = load()
    ids = np.arange(len(x), dtype="int32")
    data = jaxdist.data.batches((x, y, ids), BATCH, shuffle=True, repeat=EPOCHS)
    state: Any = {"w": jnp.zeros((64, 10)), "counts": jnp.zeros(len(x), jnp.int32)}
    done, loss = 0, jnp.zeros(())
    checkpoints = None
    if folder is not None:
        checkpoints = jaxdist.training.Checkpoints(folder, timeout_seconds=30)
        # The newest can be half of what a killed process wrote only if it is not there at all.
        restored = checkpoints.restore(state, sharding=strategy.replicated_sharding)
        if restored is not None:
            done, state = restored.step, restored.state
        checkpoints.on_failure(lambda: (done, state))
    iterator = iter(strategy.experimental_distribute_dataset(data))
    for batch in itertools.islice(iterator, done, None):
        state, loss = strategy.run(step, (state, batch))
        done += 1
        print("at", done, flush=True)
        if checkpoints is not None and done % 7 == 0:
            checkpoints.save(done, state)
    logits = x @ np.asarray(state["w"].addressable_data(0))
    counts = np.asarray(state["counts"].addressable_data(0))
    return {
        "done": done,
        "loss": float(loss),
        "accuracy": float((logits.argmax(1) == y).mean()),
        "counts": [int(counts.min()), int(counts.max())],
    }


if __name__ == "__main__":
    print("pid", os.getpid(), flush=True)
    folder = pathlib.Path(sys.argv[1])
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    result = train(strategy, folder / "checkpoints")
    if jax.process_index() == 0:
        (folder / "result.json").write_text(json.dumps(result))
