"""Topologies made by hand, from bytes and from devices, and what is refused."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist import tpu
from jaxdist.errors import ArgumentTypeError, CoordinateError, TopologyError
from jaxdist.tpu.experimental import Topology
from tests.strategies.oracle import refused

TWO_BY_TWO = [[list(p) for p in itertools.product(range(2), range(2), range(1), range(2))]]
# What `tf.tpu.experimental.Topology(...).serialized()` of TensorFlow 2.21 gives for it.
BYTES_OF_TENSORFLOW = (
    b'\n\x04\x02\x02\x01\x02\x10\x01\x18\x08" \x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x00\x00'
    b"\x00\x01\x00\x01\x01\x00\x00\x00\x01\x00\x00\x01\x01\x01\x00\x00\x01\x01\x00\x01"
)


def _two_by_two(missing: int = 0) -> Topology:
    return Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=[TWO_BY_TWO[0][missing:]])


def test_topology_says_what_it_was_made_of() -> None:
    topology = _two_by_two()
    assert topology.mesh_shape.tolist() == [2, 2, 1, 2]
    assert topology.mesh_rank == 4
    assert topology.device_coordinates.tolist() == TWO_BY_TWO
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, 8)
    assert topology.missing_devices.shape == (0, 4)


def test_names_and_ordinals_follow_the_order_of_the_devices() -> None:
    topology = _two_by_two()
    for ordinal, place in enumerate(TWO_BY_TWO[0]):
        assert topology.task_ordinal_at_coordinates(place) == 0
        assert topology.tpu_device_ordinal_at_coordinates(place) == ordinal
        assert topology.tpu_device_name_at_coordinates(place) == f"/task:0/device:TPU:{ordinal}"
        assert topology.cpu_device_name_at_coordinates(place, "w") == "/job:w/task:0/device:CPU:0"


def test_devices_that_are_missing_are_listed_and_have_no_name() -> None:
    topology = _two_by_two(missing=1)
    assert topology.missing_devices.tolist() == [[0, 0, 0, 0]]
    assert topology.task_ordinal_at_coordinates([0, 0, 0, 0]) == -1
    assert topology.tpu_device_ordinal_at_coordinates([0, 0, 0, 0]) == -1
    with refused(CoordinateError, "[0, 0, 0, 0]", "1 of 8 devices", "device_coordinates"):
        topology.tpu_device_name_at_coordinates([0, 0, 0, 0])


def test_bytes_are_those_of_tensorflow_and_are_read_again() -> None:
    assert _two_by_two().serialized() == BYTES_OF_TENSORFLOW
    assert Topology(serialized=BYTES_OF_TENSORFLOW) == _two_by_two()


@given(st.lists(st.integers(1, 300), min_size=4, max_size=4), st.data())
def test_serialized_topology_is_equal_when_read_again(mesh: list[int], data: st.DataObject) -> None:
    place = st.tuples(*(st.integers(0, size - 1) for size in mesh))
    places = data.draw(st.lists(place, max_size=6, unique=True))
    by_task = np.array(places, np.int32).reshape(-1, 1, 4)
    if np.prod(mesh) > 10_000:
        mesh = (by_task.reshape(-1, 4).max(0, initial=0) % 9 + 1).tolist()
        by_task = np.unique(by_task % mesh, axis=0)
    topology = Topology(mesh_shape=mesh, device_coordinates=by_task)
    assert Topology(serialized=topology.serialized()) == topology
    assert hash(Topology(serialized=topology.serialized())) == hash(topology)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_topology_or_a_named_error(message: bytes) -> None:
    try:
        topology = Topology(serialized=message)
    except TopologyError:
        return
    assert Topology(serialized=topology.serialized()) == topology


def test_fields_of_a_newer_writer_are_skipped() -> None:
    newer = b"\x2a\x02\x08\x01" + BYTES_OF_TENSORFLOW + b"\x31" + b"\x00" * 8
    assert Topology(serialized=newer) == _two_by_two()


def test_arrays_of_a_topology_cannot_be_written() -> None:
    topology = _two_by_two()
    for array in (topology.mesh_shape, topology.device_coordinates, topology.missing_devices):
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({}, ArgumentTypeError, ["neither serialized nor mesh_shape"]),
        ({"mesh_shape": [1] * 4}, ArgumentTypeError, ["neither serialized nor device_coordinates"]),
        ({"mesh_shape": [1] * 3, "device_coordinates": [[[0] * 3]]}, TopologyError, ["[1, 1, 1]"]),
        ({"mesh_shape": [2, 0, 1, 1], "device_coordinates": [[[0] * 4]]}, TopologyError, ["2, 0"]),
        ({"mesh_shape": [-2, 1, 1, 1], "device_coordinates": []}, TopologyError, ["[-2, 1"]),
        ({"mesh_shape": [2**12] * 4, "device_coordinates": []}, TopologyError, ["4194304 cores"]),
        ({"mesh_shape": [2**40] * 4, "device_coordinates": []}, TopologyError, ["1099511627776"]),
        ({"mesh_shape": [1.5] * 4, "device_coordinates": []}, ArgumentTypeError, ["float64"]),
        ({"mesh_shape": [1] * 4, "device_coordinates": [[0] * 4]}, IndexError, ["[1, 4]"]),
        ({"mesh_shape": [1] * 4, "device_coordinates": [[[0] * 3]]}, TopologyError, ["[1, 1, 3]"]),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[0] * 4], [[2, 0, 0, 0]]]},
            IndexError,
            ["device_coordinates[1][0]", "[2, 0, 0, 0]", "[2, 1, 1, 1]", "[1, 0, 0, 0]"],
        ),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[0, 0, 0, -1]]]},
            CoordinateError,
            ["[0, 0, 0, -1]", "count from 0"],
        ),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[1, 0, 0, 0], [1, 0, 0, 0]]]},
            TopologyError,
            ["[0][0] and [0][1] are both [1, 0, 0, 0]"],
        ),
        (
            {"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[0] * 4], []]},
            TopologyError,
            ["ragged"],
        ),
        ({"serialized": "text"}, ArgumentTypeError, ["bytes", "str"]),
        ({"serialized": b"junk"}, ValueError, ["4 bytes", "serialized()"]),
        ({"serialized": b""}, ValueError, ["mesh_shape is []"]),
        ({"serialized": BYTES_OF_TENSORFLOW[:-4]}, ValueError, ["serialized"]),
        ({"serialized": b"\n\x03\x01\x01\x01"}, ValueError, ["[1, 1, 1]"]),
        ({"serialized": b"\n\x04\x01\x01\x01\x01\x10\x01\x18\x02"}, ValueError, ["are 8"]),
        (
            {"serialized": b"\n\x04\x01\x01\x01\x01\x10" + b"\xff" * 9 + b"\x01"},
            ValueError,
            ["-1 tasks"],
        ),
        ({"serialized": BYTES_OF_TENSORFLOW, "mesh_shape": [1] * 4}, TopologyError, ["alone"]),
    ],
)
def test_what_is_no_topology_is_refused(arguments: Any, error: Any, parts: list[str]) -> None:
    with refused(error, *parts):
        Topology(**arguments)


@pytest.mark.parametrize("place", [[2, 0, 0, 0], [0, 0, 0, -1], [0, 0, 0], [0, 0, 0, 0, 0]])
def test_coordinates_outside_the_mesh_are_refused(place: list[int]) -> None:
    with refused(CoordinateError, str(place), "[2, 2, 1, 2]", "[1, 1, 0, 1]"):
        _two_by_two().task_ordinal_at_coordinates(place)


@pytest.mark.parametrize("place", [None, 0.5, "0000", [0, 0, 0, 0.7], ["0", 0, 0, 0]], ids=repr)
def test_coordinates_that_are_no_integers_are_refused(place: Any) -> None:
    for method in ("tpu_device_ordinal_at_coordinates", "tpu_device_name_at_coordinates"):
        with refused(ArgumentTypeError, f"{method}: device_coordinates was given as"):
            getattr(_two_by_two(), method)(place)
    with refused(CoordinateError, "device_coordinates=3, and"):
        _two_by_two().task_ordinal_at_coordinates(3)  # type: ignore[arg-type]


def test_coordinates_of_devices_count_from_the_first_chip_that_is_there() -> None:
    part = [c for c in tpu.slice_of("v5e:4x4").cores if c.coords[0] >= 2]
    topology, devices = tpu.topology_of(part)
    assert topology.mesh_shape.tolist() == [2, 4, 1, 1]
    assert not topology.missing_devices.size
    assert [[d.process_index for d in task] for task in devices] == [[1] * 4, [3] * 4]


def test_slices_lie_behind_one_another() -> None:
    both = tpu.slice_of("v5e:2x2*3").topology
    assert both.mesh_shape.tolist() == [2, 2, 3, 1]
    assert both.num_tasks == 3
    assert both.device_coordinates[:, :, 2].tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_devices_without_a_place_are_refused() -> None:
    with refused(ArgumentTypeError, "devices, and 8 of 8", "coords"):
        tpu.topology_of(jax.devices("cpu")[:8])
    with refused(TopologyError, "no devices"):
        tpu.topology_of([])


def test_processes_with_different_numbers_of_devices_are_refused() -> None:
    with refused(TopologyError, "{0: 4, 1: 3}"):
        tpu.topology_of(tpu.slice_of("v5e:4x2").cores[:-1])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("v5e", ["'v5e'", "v5e:4x4"]),
        ("v5e:4", ["'v5e:4'"]),
        ("v9:2x2", ["'v9'", "v6e"]),
        ("v5e:0x2", ["size of 0"]),
        ("v5e:2x2*0", ["size of 0"]),
        ("v5e:2x2x2", ["2 layers", "x and y only", "v5e:2x4", "v5e:2x2*2"]),
        ("v3:4x4x4*2", ["4 layers", "v3:4x16", "v3:4x4*8"]),
        ("v5e:3x2", ["3 is odd", "v5e:2x2 and v5e:4x2"]),
    ],
)
def test_slices_that_cannot_be_are_refused(name: str, parts: list[str]) -> None:
    with refused(TopologyError, *parts):
        tpu.slice_of(name)
