"""Making variables, and reading their copies apart from the code under test."""

from typing import Any

import jax
import numpy as np

import jaxdist
from jaxdist import Variable, VariableAggregation, VariableSynchronization

ON_READ = VariableSynchronization.ON_READ
ON_WRITE = VariableSynchronization.ON_WRITE
NONE, SUM, MEAN, FIRST = VariableAggregation
AGGREGATIONS = list(VariableAggregation)


def strategy_of(count: int) -> jaxdist.MirroredStrategy:
    """A strategy of that many replicas."""
    return jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])


def made(strategy: jaxdist.Strategy, initial_value: Any = 10.0, **options: Any) -> Variable:
    """A variable of `strategy`."""
    with strategy.scope():
        return Variable(initial_value, name="w", **options)


def copies(variable: Variable) -> list[Any]:
    """What the variable has on each replica."""
    return [np.asarray(v).tolist() for v in variable.values]


def devices_of(values: Any) -> list[set[jax.Device]]:
    """The devices that each of some arrays lies on."""
    return [v.devices() for v in values]
