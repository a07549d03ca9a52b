"""The input path puts a batch on the devices no slower than a bare `device_put`.

Claim: `next` of a distributed dataset takes at most 1.0 times `jax.device_put(batch, sharding)` of
the same batch of the MLP (256 x 784 float32 and labels), and at most 0.8 of TensorFlow's `next` at
one replica and 0.5 at 2, 4 and 8.

One step is one batch, from NumPy arrays that are the same each time to arrays that are there:
every batch is waited for before the next is asked for.

- Against `device_put` nothing is read ahead. Both do all their work in the calling thread, and
  the consumer does nothing that reading ahead could hide behind.
- Against TensorFlow both have the options that users get: one batch read ahead for each replica.

The batch starts where NumPy puts large arrays, so that `device_put` copies it. A dataset copies
every batch, since its source may write over the arrays. Against a `device_put` that copies nothing
but takes aligned memory over, it is reported only. All arms come to the same bytes.
"""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import jax
import numpy as np

import jaxdist
from benchmarks import _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._host_batch import checksum, mlp_batch
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import strategy

ROW = "20"


def api(n: int, ahead: int) -> Loop:
    """`next` of a distributed dataset that reads so many batches ahead."""
    options = jaxdist.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = strategy(n).experimental_distribute_dataset(repeat(mlp_batch()), options)
    batches = iter(dataset)
    return _blocking(lambda: next(batches))


def put(n: int, aligned: bool) -> Loop:
    """`device_put` of the whole batch."""
    batch, sharding = mlp_batch(aligned=aligned), strategy(n).per_replica_sharding
    return _blocking(lambda: jax.device_put(batch, sharding))


def _blocking(make: Callable[[], Any]) -> Loop:
    last: list[Any] = []

    def loop(steps: int) -> None:
        batch = None
        for _ in range(steps):
            batch = jax.block_until_ready(make())
        last[:] = [batch]

    # A `PerReplica` holds one global array, in the order of the replicas.
    return Loop(loop, facts=lambda: {"bytes": checksum(map(np.asarray, jax.tree.leaves(last)))})


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("next of a dataset against TensorFlow's")
    for n in bench.options.sizes(1, 2, 4, 8):
        arms = {
            "next": arm(api, n=n, ahead=0),
            "device_put": arm(put, n=n, aligned=False),
            "device_put, no copy": arm(put, n=n, aligned=True),
        }
        if not skipped:
            arms["next, 1 ahead"] = arm(api, n=n, ahead=1)
            arms["tf next"] = tensorflow_arm(_tensorflow.next_batch, n=n)
        steps = {label: bench.options.steps(100 if label == "tf next" else 500) for label in arms}
        race = bench.race(f"N={n}", arms, steps)
        yield race.line("next", "device_put", Need(1.0))
        yield race.same("bytes", "next", "device_put")
        yield race.line("next", "device_put, no copy", Need())
        if not skipped:
            yield race.line("next, 1 ahead", "tf next", Need(0.8 if n == 1 else 0.5))
            yield race.same("bytes", "next, 1 ahead", "tf next")
    if skipped:
        yield skipped
