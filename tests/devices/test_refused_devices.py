"""Numbers of virtual devices, and slices, that this process cannot have."""

import importlib.util

import jax
import pytest

import jaxdist
from jaxdist.errors import BackendStartedError, DeviceError
from tests.strategies.oracle import refused


def test_another_number_of_devices_after_the_start_names_both_numbers() -> None:
    before = len(jax.devices("cpu"))
    with refused(BackendStartedError, f"virtual_devices({before + 3})", f"{before} CPU device(s)"):
        jaxdist.testing.virtual_devices(before + 3)
    assert len(jax.devices("cpu")) == before


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu describes slices")
def test_nothing_runs_on_a_slice_that_is_only_described() -> None:
    resolver = jaxdist.cluster_resolver.TPUClusterResolver("described:v5e:2x2")
    strategy = jaxdist.TPUStrategy(resolver)
    with refused(DeviceError, "strategy.run needs devices", "4 devices", "strategy.lower"):
        strategy.run(lambda x: x + 1, (1.0,))
