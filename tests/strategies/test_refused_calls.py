"""Strategies refuse values of all replicas where one replica's are asked for, by name."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import ArgumentTypeError
from tests.strategies.logical import tpus
from tests.strategies.oracle import refused

OUTSIDE = {"x": PerReplica([1.0, 2.0])}
CALLS: dict[str, Callable[[Any], Any]] = {
    "assign_to_logical_device": lambda e: e.experimental_assign_to_logical_device(OUTSIDE, 1),
    "split_to_logical_devices": lambda e: e.experimental_split_to_logical_devices(OUTSIDE, [2]),
    "replicate_to_logical_devices": lambda e: e.experimental_replicate_to_logical_devices(OUTSIDE),
}


@pytest.mark.parametrize("name", CALLS)
def test_logical_devices_hold_the_value_of_one_replica(name: str) -> None:
    strategy = tpus(2, 2)
    with refused(ArgumentTypeError, name, "tensor['x']", "PerReplica"):
        strategy.run(lambda: CALLS[name](strategy))


@pytest.mark.parametrize("name", [3, None, b"loss"])
def test_outputs_of_several_steps_have_names_that_are_texts(name: Any) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset([jnp.ones(2)])

    def step(context: Any, inputs: Any) -> None:
        context.set_non_tensor_output(name, inputs)

    parts = "MultiStepContext.set_non_tensor_output", f"the name {name!r}", "Pass a string"
    with refused(ArgumentTypeError, *parts):
        strategy.extended.experimental_run_steps_on_iterator(step, iter(dataset))
