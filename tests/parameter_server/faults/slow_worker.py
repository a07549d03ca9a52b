"""A job one of whose workers is ten times as slow, and the log of versions that its server keeps.

`python slow_worker.py <steps> <max_staleness> ...` is each of its tasks; "any" is no bound.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import (
    ClusterCoordinator,
    ServerOptimizer,
    experimental_get_current_worker_index,
)

SLOW = 0  # the number of the worker
# A few milliseconds of work, and ten times as many.
LOOPS, TIMES = 1000, 10


@dataclasses.dataclass(frozen=True)
class Found:
    """What a job has found.

    Args:
        reads: For each change, in the order in which the server applied them, the number of changes
            that were applied when it was read what the change was computed from.
        numbers: For each change, the number of its function.
        by_slow: For each change, whether the slow worker computed it.
        staleness: How many changes of each staleness the coordinator has counted.
        counts: How many functions were scheduled, applied and lost.
    """

    reads: Sequence[int]
    numbers: Sequence[int]
    by_slow: Sequence[bool]
    staleness: Mapping[int, int]
    counts: Mapping[str, int]

    def list_staleness(self) -> list[int]:
        """Return the staleness of each change by the log alone."""
        return [at - read for at, read in enumerate(self.reads)]


def make_batches() -> Iterator[Any]:
    """Return how much there is to compute, and whether this is the slow worker."""
    is_slow = experimental_get_current_worker_index() == SLOW
    while True:
        yield {"loops": np.int32(LOOPS * (TIMES if is_slow else 1)), "slow": np.float32(is_slow)}


def keep_log() -> optax.GradientTransformation:
    """Return a transformation whose parameter is a log.

    Column 0 has the number of changes so far. Each change fills the next column with what column 0
    of its gradient has. So the server writes what a worker had read in the order of the changes.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def add(grad: Any, log: Any) -> Any:
            column = 1 + log[0, 0].astype(jnp.int32)
            return jnp.zeros_like(log).at[0, 0].set(1).at[:, column].add(grad[:, 0])

        return jax.tree.map(add, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def run(strategy: Any, steps: int, name: str = "log") -> Found:
    """Run so many functions, with a log of this name."""
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        log = jaxdist.Variable(np.zeros((3, 1 + steps), np.float32), name=name)
    optimizer = ServerOptimizer(keep_log(), [log])

    def step(number: Any, batches: Any) -> Any:
        batch = next(batches)
        read = log.value()
        start = jnp.linspace(0, 1, 1000) + read[0, 0]
        work = jax.lax.fori_loop(0, batch["loops"], lambda _, x: jnp.sin(x) + 0.5, start)
        column = jnp.stack([read[0, 0], number, batch["slow"]])
        optimizer.apply_gradients([(jnp.zeros_like(read).at[:, 0].set(column), log)])
        return work.sum()

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    # Servers count for as long as they live.
    before = Counter(coordinator.statistics().staleness)
    for number in range(steps):
        coordinator.schedule(step, (np.float32(number), batches))
    coordinator.join()
    found = coordinator.statistics()
    (changes, *_), *_ = rows = log.numpy()
    assert changes == steps
    reads, numbers, slow = rows[:, 1:]
    counts = {name: getattr(found, name) for name in ("scheduled", "applied", "lost")}
    return Found(
        [int(x) for x in reads],
        [int(x) for x in numbers],
        [bool(x) for x in slow],
        Counter(found.staleness) - before,
        counts,
    )


def main(steps: int, bounds: Sequence[str]) -> None:
    """Be one task; the chief prints what it has found with each bound as a line of JSON."""
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        jaxdist.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return
    for bound in bounds:
        most = None if bound == "any" else int(bound)
        strategy = jaxdist.ParameterServerStrategy(resolver, max_staleness=most)
        found = run(strategy, steps, f"log with {bound}")
        print(json.dumps({"event": f"end of {bound}", **vars(found)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
