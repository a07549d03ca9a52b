"""A function that makes the dataset of a worker makes no variable, in a scope or outside."""

import contextlib
from typing import Any

import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import ClosureInputError
from tests.strategies.oracle import refused


@pytest.mark.parametrize("in_scope", [False, True])
def test_a_variable_in_a_dataset_function_is_an_error(in_scope: bool) -> None:
    cluster = ClusterSpec({"worker": ["w:1"], "ps": ["p:1"]})
    resolver = SimpleClusterResolver(cluster, rpc_layer="local")
    strategy = jaxdist.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)

    def make() -> Any:
        with strategy.scope() if in_scope else contextlib.nullcontext():
            offset = jaxdist.Variable(1.0, name="offset")
        return [np.ones(2) + float(offset)]

    dataset = coordinator.create_per_worker_dataset(make)
    with refused(
        ClosureInputError,
        "InputContextError",
        "'offset'",
        "create_per_worker_dataset",
        "strategy.scope()",
    ):
        coordinator.schedule(lambda it: next(it).sum(), (iter(dataset),)).fetch()
    # Outside of dataset functions variables are made as before.
    assert float(jaxdist.Variable(2.0)) == 2
