"""The chief of a training that workers join: `python joining_script.py <steps> <address>`.

With an address it calls `add_worker`. It prints one line of JSON for each thing that it has found.
"""

import json
import sys
from collections import Counter

import numpy as np

import jaxdist
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator, experimental_get_current_worker_index


def own_numbers():
    """Return the index of this worker, again and again."""
    index = experimental_get_current_worker_index()
    while True:
        yield np.int32(index)


def say(**found: object) -> None:
    """Tell the test."""
    print(json.dumps(found), flush=True)


def main(steps: int, address: str) -> None:
    """Run steps in rounds until the new worker has run some, and then all that are left."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = jaxdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
        server.join()
        return
    strategy = jaxdist.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = jaxdist.Variable(0, name="count")

    def step(numbers):
        count.assign_add(1)
        return next(numbers)

    numbers = iter(coordinator.create_per_worker_dataset(own_numbers))
    coordinator.schedule(step, args=(numbers,)).fetch()
    say(event="first")
    sys.stdin.readline()
    if address:
        say(event="added", index=coordinator.add_worker(address))
    ran_on: Counter[int] = Counter([0])
    while sum(n for worker, n in ran_on.items() if worker) < 20 or ran_on.total() < steps:
        results = [coordinator.schedule(step, args=(numbers,)) for _ in range(50)]
        ran_on.update(int(x) for x in coordinator.fetch(results))
        say(event="round")
    coordinator.join()
    found = coordinator.statistics()
    say(
        event="end",
        count=int(count),
        ran_on=dict(ran_on),
        total=ran_on.total(),
        scheduled=found.scheduled,
        applied=found.applied,
        lost=found.lost,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
