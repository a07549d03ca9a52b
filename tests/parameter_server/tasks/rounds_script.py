"""The script of all tasks of a job that trains in rounds until it is told to end.

`python rounds_script.py <steps of a round>`; the chief prints a line of JSON after each round.
"""

import json
import sys
import threading
import time

import jax
import numpy as np
import optax
from flax import nnx

import jaxdist
from jaxdist import ParameterServerStrategy
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator

ROWS = 64


def dataset_fn():
    """Return batches without end."""
    x = np.random.default_rng(0).normal(size=(ROWS, 128)).astype(np.float32)
    while True:
        yield {"x": x, "y": x[:, :10].argmax(1)}


def main(steps: int) -> None:
    """Train, and say after each round what was counted."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        jaxdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    strategy = ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(128, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 10, rngs=rngs)
        )
        optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
        count = jaxdist.Variable(0, name="count")

    def step(model, optimizer, iterator):
        def replica_fn(model, optimizer, batch):
            def loss_of(model):
                logits = model(batch["x"])
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
                return losses.mean()

            loss, grads = nnx.value_and_grad(loss_of)(model)
            optimizer.update(model, grads)
            count.assign_add(1)
            return loss

        return strategy.run(replica_fn, (model, optimizer, next(iterator)))

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    given = (model, optimizer, iterator)
    told = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    while not told.is_set():
        began = time.perf_counter()
        results = [coordinator.schedule(step, args=given) for _ in range(steps)]
        coordinator.join()
        seconds = time.perf_counter() - began
        say(event="round", seconds=seconds, count=int(count), loss=float(results[-1].fetch()))
    found = coordinator.statistics()
    sums = jax.tree.map(lambda leaf: float(np.sum(leaf)), nnx.to_pure_dict(nnx.state(model)))
    say(
        event="end",
        count=int(count),
        scheduled=found.scheduled,
        applied=found.applied,
        lost=found.lost,
        sums=jax.tree.leaves(sums),
    )


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
