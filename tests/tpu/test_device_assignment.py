"""What an assignment says of its replicas, and what is refused."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxdist import tpu
from jaxdist.errors import ArgumentError, ArgumentTypeError, CoordinateError, TopologyError
from jaxdist.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology
from tests.strategies.oracle import refused

MESH = Topology(
    mesh_shape=[2, 2, 1, 2],
    device_coordinates=[list(itertools.product(range(2), range(2), range(1), range(2)))],
)
WITH_A_GAP = Topology(
    mesh_shape=[2, 2, 1, 2], device_coordinates=MESH.device_coordinates[:, [0, 1, 2, 3, 5, 6, 7]]
)
PAIRS = DeviceAssignment.build(MESH, computation_shape=[1, 1, 1, 2], num_replicas=4)


def test_assignment_says_where_each_logical_device_is() -> None:
    assert (PAIRS.num_replicas, PAIRS.num_cores_per_replica) == (4, 2)
    assert PAIRS.topology is MESH
    assert PAIRS.core_assignment.dtype == np.int32
    assert not PAIRS.core_assignment.flags.writeable
    assert PAIRS.coordinates(0, 1) == (0, 0, 0, 1)
    assert PAIRS.tpu_ordinal(1, 1) == 5
    assert PAIRS.tpu_ordinal() == 0
    assert PAIRS.host_device(1, 1) == "/task:0/device:CPU:0"
    assert PAIRS.host_device(job="w") == "/job:w/task:0/device:CPU:0"
    assert PAIRS.tpu_device(1, 1) == "/task:0/device:TPU:5"
    assert PAIRS.tpu_device(1, 1, "w") == "/job:w/task:0/device:TPU:5"


def test_replicas_are_found_by_task_and_logical_device() -> None:
    assert PAIRS.lookup_replicas(0, 0) == PAIRS.lookup_replicas(0, 1) == [0, 1, 2, 3]
    of_hosts = DeviceAssignment.build(tpu.slice_of("v4:2x2x2").topology, [1, 1, 1, 2], None, 8)
    on_tasks = [of_hosts.lookup_replicas(task, 0) for task in (0, 1)]
    assert sorted(itertools.chain(*on_tasks)) == list(range(8))
    for task, replicas in enumerate(on_tasks):
        assert {of_hosts.host_device(r, 1) for r in replicas} == {f"/task:{task}/device:CPU:0"}


def test_the_bytes_of_a_topology_are_as_good_as_the_topology() -> None:
    assert DeviceAssignment.build(MESH.serialized(), [1, 1, 1, 2], num_replicas=4) == PAIRS


def test_single_core_assignment_is_one_replica_on_the_first_core() -> None:
    single = DeviceAssignment(MESH, tpu.SINGLE_CORE_ASSIGNMENT)
    assert single == DeviceAssignment.build(MESH)
    assert single.core_assignment.tolist() == [[[0, 0, 0, 0]]]


def test_no_replicas_are_an_empty_assignment() -> None:
    assert DeviceAssignment.build(MESH, num_replicas=0).core_assignment.shape == (0, 1, 4)
    assert DeviceAssignment.build(WITH_A_GAP, num_replicas=0).num_replicas == 0


def test_modes_are_taken_by_number() -> None:
    rings = DeviceAssignment.build(MESH, [1, 1, 1, 2], None, 4, 1)
    assert rings == DeviceAssignment.build(MESH, [1, 1, 1, 2], None, 4, DeviceOrderMode.RING)
    assert [mode.value for mode in DeviceOrderMode] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"computation_shape": [3, 1, 1, 1]}, ValueError, ["[3, 1, 1, 1]", "[2, 2, 1, 2]"]),
        (
            {"computation_shape": [2, 1, 1, 1], "computation_stride": [2, 1, 1, 1]},
            ValueError,
            ["product is [4, 1, 1, 1]", "[2, 2, 1, 2]"],
        ),
        ({"computation_shape": [1, 1, 1]}, ValueError, ["computation_shape has shape [3]"]),
        ({"computation_shape": [0, 1, 1, 1]}, ValueError, ["[0, 1, 1, 1]", "Use [1, 1, 1, 1]"]),
        ({"computation_stride": [-1, 1, 1, 1]}, ValueError, ["computation_stride is [-1"]),
        ({"computation_stride": [1, 1]}, ValueError, ["computation_stride has shape [2]"]),
        ({"computation_shape": "ab"}, ArgumentTypeError, ["computation_shape"]),
        ({"computation_shape": [1.0] * 4}, ArgumentTypeError, ["float64"]),
        ({"num_replicas": 9}, ValueError, ["num_replicas=9", "8 of", "num_replicas=8 or less"]),
        ({"num_replicas": -1}, ArgumentError, ["-1", "from 0 to 8"]),
        ({"num_replicas": 2.0}, TypeError, ["2.0", "float"]),
        ({"num_replicas": None}, TypeError, ["None"]),
        ({"num_replicas": True}, TypeError, ["True"]),
        ({"device_order_mode": 7}, ArgumentError, ["7", "AUTO (0), DeviceOrderMode.RING (1)"]),
        ({"device_order_mode": "RING"}, ArgumentError, ["'RING'"]),
        (
            {"device_order_mode": DeviceOrderMode.RING, "num_replicas": 3},
            ValueError,
            ["1 of the 2 cores of a chip", "3 of the 8 replicas", "AUTO"],
        ),
        (
            {"device_order_mode": 1, "computation_stride": [2, 1, 1, 1]},
            ValueError,
            ["not all 1"],
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(arguments: Any, error: Any, parts: list[str]) -> None:
    with refused(error, *parts):
        DeviceAssignment.build(MESH, **arguments)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"num_replicas": 8}, ["need 8 devices", "topology has 7", "num_replicas=7 or less"]),
        ({"num_replicas": 4, "computation_shape": [1, 1, 1, 2]}, ["num_replicas=3 or less"]),
        ({"computation_stride": [2, 1, 1, 1]}, ["stride [2", "[[1, 0, 0, 0]]"]),
        ({"device_order_mode": DeviceOrderMode.RING}, ["RING", "1 device"]),
    ],
)
def test_what_needs_a_mesh_without_gaps_is_refused_where_there_are_gaps(
    arguments: Any, parts: list[str]
) -> None:
    with refused(TopologyError, *parts):
        DeviceAssignment.build(WITH_A_GAP, **arguments)


@pytest.mark.parametrize("topology", [None, "v5e:2x2", b"junk"])
def test_what_is_no_topology_is_refused(topology: Any) -> None:
    with pytest.raises(TopologyError):
        DeviceAssignment.build(topology)
    with refused(TopologyError, "topology is a Topology", "initialize_tpu_system"):
        DeviceAssignment(topology, tpu.SINGLE_CORE_ASSIGNMENT)


@pytest.mark.parametrize(
    ("cores", "error", "parts"),
    [
        ([[0, 0, 0, 0]], TopologyError, ["[1, 4]"]),
        ([[[0, 0, 0]]], TopologyError, ["[1, 1, 3]"]),
        ([[[0, 0, 0, 7]]], IndexError, ["core_assignment[0][0]", "[0, 0, 0, 7]"]),
        ([[[0, 0, 0, -1]]], IndexError, ["[0, 0, 0, -1]"]),
        (
            [[[0, 0, 0, 0]], [[0, 0, 0, 0]]],
            TopologyError,
            ["core_assignment[0][0] and [1][0] are both [0, 0, 0, 0]"],
        ),
        (
            [[[1, 0, 0, 0]]],
            CoordinateError,
            ["no device has these coordinates", "core_assignment[0][0]"],
        ),
    ],
)
def test_cores_that_cannot_be_assigned_are_refused(
    cores: Any, error: Any, parts: list[str]
) -> None:
    with refused(error, *parts):
        DeviceAssignment(WITH_A_GAP, cores)


@pytest.mark.parametrize(("replica", "logical"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_replicas_and_logical_devices_out_of_range_are_refused(replica: int, logical: int) -> None:
    for method in (PAIRS.coordinates, PAIRS.tpu_ordinal, PAIRS.host_device, PAIRS.tpu_device):
        with refused(CoordinateError, "4 replica(s) of 2 core(s)", method.__name__):
            method(replica, logical)


def test_numbers_of_replicas_that_are_no_integers_are_refused() -> None:
    wrongs: list[Any] = [None, "0", 0.5, [0]]
    for wrong in wrongs:
        for method in (PAIRS.coordinates, PAIRS.tpu_device, PAIRS.lookup_replicas):
            with refused(ArgumentTypeError, f"{method.__name__} was given", f"={wrong!r}"):
                method(wrong, 0)
            with refused(ArgumentTypeError, f"{method.__name__} was given logical_core={wrong!r}"):
                method(0, wrong)


def test_tasks_without_replicas_are_refused() -> None:
    with refused(TopologyError, "task_id=1 and logical_core=0", "[0]"):
        PAIRS.lookup_replicas(1, 0)
    with refused(TopologyError, "0 to 1"):
        PAIRS.lookup_replicas(0, 2)
