"""A program may end while its last step still runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from tests.processes.job import run_job
from tests.tables import sampled


def run_one_step() -> None:
    """Dispatch a step of some milliseconds, and end without waiting for it."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    weights = [jnp.ones((8, 8)) * k for k in range(100)]
    x = strategy.experimental_distribute_values_from_function(lambda c: np.ones((4, 8), "float32"))

    def step(weights: Any, x: Any) -> Any:
        def find_loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return y.sum()

        replica = jaxdist.get_replica_context()
        assert replica is not None
        grads = replica.all_reduce("mean", jax.grad(find_loss)(weights))
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    strategy.run(step, (weights, x))


@pytest.mark.parametrize("attempt", sampled(list(range(30)), 2))
def test_a_process_that_ends_right_after_a_step_ends_with_code_0(attempt: int) -> None:
    for outcome in run_job(run_one_step, 2, optimized=True):
        assert outcome.exit_code == 0, outcome.describe()
