"""Loops over datasets in a real job; `test_loops.py` runs them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist


def _sum(x: Any) -> Any:
    return jaxdist.get_replica_context().all_reduce("sum", jnp.sum(x))


def read_until_all_have_ended() -> tuple[list[float], list[int]]:
    """The sums of the steps over all processes, and the rows here; process 1 has more data."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()

    def read(context: jaxdist.InputContext) -> Any:
        number = context.input_pipeline_id
        return [np.full(3, 1.0 + i) for i in range(2 + 4 * number)]

    steps = list(strategy.distribute_datasets_from_function(read))
    sums = [float(strategy.run(_sum, (x,))) for x in steps]
    return sums, [sum(v.shape[0] for v in x.values) for x in steps]


def leave_loops_open() -> int:
    """Break out of loops over data that has no end, and leave their iterators open."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    open_iterators = []
    for depth in (0, 1, 3):
        options = jaxdist.InputOptions(experimental_per_replica_buffer_size=depth)
        data = strategy.experimental_distribute_dataset(
            (np.arange(8.0) for _ in itertools.count()), options
        )
        iterator = iter(data)
        assert float(strategy.run(_sum, (next(iterator),))) == 28
        open_iterators.append(iterator)
    globals()["_open"] = open_iterators
    return len(jax.devices())
