"""A chief that runs a short job, whole, for each line of its input, and prints what it counted."""

import json
import sys
import time
from typing import Any

import numpy as np

import jaxdist
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import JaxdistError
from tests.parameter_server.faults.batches import count_up

STEPS = 6


def train(name: str) -> dict[str, Any]:
    """Run the job, with variables of its own."""
    strategy = jaxdist.ParameterServerStrategy(TFConfigClusterResolver())
    coordinator = ClusterCoordinator(strategy)
    try:
        return _train(strategy, coordinator, name)
    finally:
        coordinator._workers.stop()
        coordinator._workers.join(20)
        links: Any = strategy.links()
        for link in links:
            link._channel.close()
        strategy.storage.close()


def _train(strategy: Any, coordinator: ClusterCoordinator, name: str) -> dict[str, Any]:
    with strategy.scope():
        w = jaxdist.Variable(np.zeros(3, np.float32), name=f"w{name}")
        count = jaxdist.Variable(0, name=f"count{name}")

    def step(batches: Any) -> Any:
        batch = next(batches)
        w.assign_add(batch)
        count.assign_add(1)
        return batch.sum()

    batches = iter(coordinator.create_per_worker_dataset(count_up))
    coordinator.schedule(step, (batches,)).fetch()
    # A change of the chief itself.
    count.assign_add(100)
    results = [coordinator.schedule(step, (batches,)) for _ in range(STEPS)]
    coordinator.join()
    sums = [float(x) for x in coordinator.fetch(results)]
    found = coordinator.statistics()
    return {
        "count": int(count),
        "total": float(w.numpy()[0]),
        "sums": sums,
        "scheduled": found.scheduled,
        "applied": found.applied,
        "lost": found.lost,
        "retried": found.retried,
    }


def main() -> None:
    """Run a job for each line."""
    for line in sys.stdin:
        began = time.monotonic()
        found: dict[str, Any] = {"error": None}
        try:
            found |= train(line.strip())
        except JaxdistError as error:
            found |= {"error": type(error).__name__, "text": str(error)}
        found["seconds"] = time.monotonic() - began
        print(json.dumps({"event": "end", **found}), flush=True)


if __name__ == "__main__":
    main()
