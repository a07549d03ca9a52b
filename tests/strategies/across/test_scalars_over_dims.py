"""`reduce` and `gather` of numbers over a dim: numbers have no dims, which the error says."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ShapeError
from tests.strategies.oracle import refused

NUMBERS: dict[str, list[Any]] = {
    "Python integers": [1, 2],
    "a Python integer and a float": [1, 2.0],
    "Python floats": [1.0, 2.0],
    "booleans": [True, False],
    "NumPy": [np.int32(1), np.int32(2)],
    "JAX": [jnp.int32(1), jnp.int32(2)],
}
STRATEGIES: dict[str, Any] = {
    "mirrored": lambda: jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one device": lambda: jaxdist.OneDeviceStrategy("cpu:0"),
    "default": jaxdist.get_strategy,
    "own class": lambda: jaxdist.MirroredStrategy(
        ["cpu:0", "cpu:1"], cross_device_ops=jaxdist.ReductionToOneDevice()
    ),
}


@pytest.mark.parametrize("axis", [0, -1, (0, 1)])
@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_numbers_have_no_dim_to_reduce_over(strategy: str, kind: str, axis: Any) -> None:
    made = STRATEGIES[strategy]()
    value = PerReplica(NUMBERS[kind][: made.num_replicas_in_sync])
    for op in ("sum", "mean"):
        with refused(ShapeError, "Strategy.reduce", "axis="):
            made.reduce(op, value, axis=axis)
    with refused(ShapeError, "Strategy.gather", "scalar"):
        made.gather(value, 0)


def test_the_rows_that_a_step_counts_are_added_up_without_an_axis() -> None:
    strategy = STRATEGIES["mirrored"]()
    [batch] = list(strategy.experimental_distribute_dataset([np.arange(3)]))
    rows = strategy.run(lambda x: x.shape[0], (batch,))
    assert int(strategy.reduce("sum", rows, axis=None)) == 3
    with refused(ShapeError, "Strategy.reduce", "Pass axis=None"):
        strategy.reduce("sum", rows, axis=0)
