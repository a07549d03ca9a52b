"""The index of a worker, in dataset functions and in functions that are traced once for all."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.coordinator import ClusterCoordinator, experimental_get_current_worker_index
from jaxdist.errors import ContextError
from tests.parameter_server.strategy.making import make_strategy


def _schedule_on_each_worker(workers: int) -> list[tuple[Any, ...]]:
    """Return what a function says of each worker, beside the index that its dataset knows."""
    strategy = make_strategy(workers=workers)
    coordinator = ClusterCoordinator(strategy)

    def dataset() -> list[np.ndarray]:
        index = experimental_get_current_worker_index()
        assert isinstance(index, int)
        return [np.full(n, index) for n in [2, 2, 3] * 50]

    def step(iterator: Any, x: Any) -> Any:
        def replica(batch: Any) -> Any:
            index = experimental_get_current_worker_index()
            inside = jax.lax.cond(
                x > 0, lambda: experimental_get_current_worker_index(), lambda: -1
            )
            return batch[0], index, inside

        return *strategy.run(replica, (next(iterator),)), experimental_get_current_worker_index()

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    found = [coordinator.schedule(step, (iterator, np.float32(1))) for _ in range(60)]
    coordinator.join()
    return [tuple(map(int, r.fetch())) for r in found]


def test_a_traced_function_gets_the_index_of_the_worker_that_runs_it() -> None:
    # Batches of the other shape are traced in the thread of a worker.
    found = _schedule_on_each_worker(3)
    assert all(len(set(each)) == 1 for each in found)
    assert {each[0] for each in found} <= {0, 1, 2}


def test_a_function_that_runs_nowhere_or_here_has_no_index() -> None:
    strategy = make_strategy()
    with pytest.raises(ContextError, match="outside of a function that runs on"):
        experimental_get_current_worker_index()
    with pytest.raises(ContextError, match="outside of a function that runs on"):
        strategy.run(experimental_get_current_worker_index)
