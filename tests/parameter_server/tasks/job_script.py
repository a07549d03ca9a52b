"""The script of all tasks of a job, as users write it: `python job_script.py <steps> <mode>`.

The chief prints one line of JSON for each thing that it has found.
"""

import json
import sys

import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist import ParameterServerStrategy
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = X @ np.arange(8, dtype=np.float32).reshape(4, 2)


def dataset_fn():
    """Return batches; each third one is shorter."""
    while True:
        for n in range(0, 60, 20):
            rows = slice(n, n + (20 if n < 40 else 12))
            yield {"x": X[rows], "y": Y[rows]}


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


def main(steps: int, mode: str) -> None:
    """Train, and say what was counted."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = jaxdist.Server(
            resolver.cluster_spec(),
            resolver.task_type,
            resolver.task_id,
            snapshot_seconds=0.5,
        )
        server.join()
        return
    strategy = ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        w = jaxdist.Variable(jnp.zeros((4, 2)), name="w")
        count = jaxdist.Variable(0, name="count")

    def step(iterator):
        def replica_fn(batch):
            error = batch["x"] @ w.value() - batch["y"]
            w.assign_sub(0.05 * batch["x"].T @ error / len(error))
            count.assign_add(1)
            return (error**2).mean()

        return strategy.run(replica_fn, (next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    coordinator.schedule(step, args=(iterator,)).fetch()
    say(event="first")
    if mode == "wait":
        sys.stdin.readline()
    results = []
    for number in range(1, steps):
        results.append(coordinator.schedule(step, args=(iterator,)))
        if number % 500 == 0:
            # Others are under way.
            results[-250].fetch()
            say(event="progress", step=number)
    coordinator.join()
    found = coordinator.statistics()
    say(
        event="end",
        count=int(count),
        loss=float(results[-1].fetch()),
        scheduled=found.scheduled,
        applied=found.applied,
        lost=found.lost,
        retried=found.retried,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
