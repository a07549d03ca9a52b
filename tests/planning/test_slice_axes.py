"""Replicas over several slices: each slice has its own order, and no ring crosses slices."""

import numpy as np
import pytest

from jaxdist import tpu
from jaxdist._planning.slice_axes import assign_slices
from jaxdist.tpu.experimental import DeviceAssignment


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "box"),
    [("v5e:2x2", (1, 1, 1, 1)), ("v5e:2x4", (2, 1, 1, 1)), ("v4:2x2x2", (1, 2, 1, 2))],
)
def test_each_slice_has_the_replicas_of_one_slice_and_no_ring_is_missed(
    name: str, box: tuple[int, ...], slices: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = tpu.slice_of(name).topology
    count = int(np.prod(one.mesh_shape) // np.prod(box))
    alone = DeviceAssignment.build(one, list(box), num_replicas=count).core_assignment
    topology = tpu.slice_of(f"{name}*{slices}").topology
    found = assign_slices(topology, box, slices).core_assignment
    for index, mine in enumerate(np.split(found, slices)):
        np.testing.assert_array_equal(mine - [0, 0, index * one.mesh_shape[2], 0], alone)
    assert "ring" not in caplog.text
