"""The table of chips, and the links that come from it."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import TPUStrategy, cost
from jaxdist.cluster_resolver import TPUClusterResolver

GENERATIONS = {"v2": 1, "v3": 1, "v4": 1, "v5e": 1, "v5p": 1, "v6e": 1, "7x": 1}


def _describe(name: str) -> TPUStrategy:
    return TPUStrategy(TPUClusterResolver(f"described:{name}"))


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_chip_names_its_sources_and_gives_the_links_of_its_devices(name: str) -> None:
    chip = cost.CHIPS[name]
    assert "http" in chip.source
    assert "http" in chip.inner_source
    inside, between = cost.TABLE[f"tpu-{name}-ici"], cost.TABLE[f"tpu-{name}-dcn"]
    assert inside.bytes_per_second * chip.devices == chip.inner_bytes_per_second
    assert between.bytes_per_second * chip.devices == chip.outer_bytes_per_second
    assert inside.memory_bytes_per_second * chip.devices == chip.hbm_bytes_per_second


@pytest.mark.parametrize(
    ("shape", "generation"),
    [("v2:2x2", "v2"), ("v4:2x2x1", "v4"), ("v5e:2x2", "v5e"), ("v5p:2x2x1", "v5p")],
)
def test_memory_of_the_table_is_what_libtpu_refuses_to_go_beyond(
    shape: str, generation: str
) -> None:
    devices = _describe(shape).layout.devices
    assert cost.chip_of(devices[0]).name == generation
    share = cost.chip_of(devices[0]).per_device(cost.devices_per_chip(devices))
    everywhere = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    most = share.hbm_bytes / 2
    fits, does_not = (
        jax.ShapeDtypeStruct((int(most * part) // 4096, 1024), np.float32, sharding=everywhere)
        for part in (0.9, 1.1)
    )
    jax.jit(lambda x: x + 1).lower(fits).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.jit(lambda x: x + 1).lower(does_not).compile()


def test_two_devices_on_a_described_v4_chip_share_its_links() -> None:
    shared = cost.links_of(_describe("v4:2x2x1").layout)
    assert shared.inner.bytes_per_second == cost.CHIPS["v4"].inner_bytes_per_second / 2
