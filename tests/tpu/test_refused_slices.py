"""Slices and topologies refuse what no TPU has, by name and with both numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdist import PerReplica, tpu
from jaxdist.errors import ArgumentTypeError, CoordinateError, JaxdistError, TopologyError
from tests.strategies.oracle import refused


def places(given: Any) -> Any:
    """The tasks and ordinals of places in a slice of 2 x 2 x 2 chips with 2 cores."""
    return tpu.slice_of("v4:2x2x2").topology.tasks_and_ordinals(given)


Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "a generation that does not exist": (
        lambda: tpu.Slice("v9", (2, 2, 1)),
        TopologyError,
        ("tpu.Slice was given generation='v9'", "v5e"),
    ),
    "a generation that is a number": (
        lambda: tpu.Slice(4, (2, 2, 1)),  # type: ignore[arg-type]
        TopologyError,
        ("tpu.Slice was given generation=4",),
    ),
    "a shape with two sizes": (
        lambda: tpu.Slice("v4", (2, 2)),  # type: ignore[arg-type]
        TopologyError,
        ("tpu.Slice was given shape=(2, 2)",),
    ),
    "more chips than a job can have": (
        lambda: tpu.Slice("v4", (100, 100, 100), 2),
        TopologyError,
        ("shape=(100, 100, 100) and num_slices=2", "2000000 chips", "smaller shape"),
    ),
    "places with three coordinates": (
        lambda: places([[0, 0, 0]]),
        CoordinateError,
        ("places of shape [1, 3]", "4 coordinates: x, y, z, core"),
    ),
    "a place without dims": (
        lambda: places(3),
        CoordinateError,
        ("places of shape []", "places=[[0, 0, 0, 0]]"),
    ),
    "a place outside of the mesh": (
        lambda: places([[0, 0, 0, 0], [0, 2, 0, 0]]),
        CoordinateError,
        ("places with [0, 2, 0, 0]", "the mesh is [2, 2, 2, 2]", "up to [1, 1, 1, 1]"),
    ),
    "a place below 0": (
        lambda: places(np.array([[0, 0, -1, 0]])),
        CoordinateError,
        ("places with [0, 0, -1, 0]", "Coordinates count from 0"),
    ),
    "the places of replicas": (
        lambda: places(PerReplica([[0, 0, 0, 0], [1, 0, 0, 0]])),
        ArgumentTypeError,
        ("Topology.tasks_and_ordinals: places was given as PerReplica", "made of integers"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_no_slice_has_is_refused_by_name(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2
