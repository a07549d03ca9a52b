"""Assignments against a table of what TensorFlow 2.21 gives, and laws that hold for all of them."""

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.errors import TopologyError
from jaxdist.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology

TABLE = pathlib.Path(__file__).parent / "tensorflow_assignments.txt"


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split("x")]


def _topology(mesh: list[int], missing: set[tuple[int, ...]] | None = None) -> Topology:
    places = [p for p in itertools.product(*map(range, mesh)) if p not in (missing or set())]
    return Topology(mesh_shape=mesh, device_coordinates=[places])


def _rows() -> Iterator[tuple[list[str], str]]:
    for line in TABLE.read_text().splitlines():
        if not line.startswith("#"):
            case, _, expected = line.partition(" = ")
            yield case.split(), expected


def _ours(case: list[str]) -> str:
    mesh, shape, stride, num_replicas, mode, missing = case
    gone = {tuple(map(int, place)) for place in missing.split(",")} if missing != "-" else set()
    try:
        assignment = DeviceAssignment.build(
            _topology(_sizes(mesh), gone),
            _sizes(shape),
            _sizes(stride),
            int(num_replicas),
            DeviceOrderMode[mode],
        )
    except TopologyError:
        return "error"
    return _text(assignment) or "none"


def _text(assignment: DeviceAssignment) -> str:
    return "|".join(
        ",".join("".join(map(str, place)) for place in replica)
        for replica in assignment.core_assignment.tolist()
    )


def test_assignments_are_those_of_tensorflow_core_by_core() -> None:
    rows = list(_rows())
    assert len(rows) > 700
    ours = [(case, expected, _ours(case)) for case, expected in rows]
    assert [row for row in ours if row[1] != row[2]] == []


# The cases of `TF_SEMANTICS`, which the project was started from.
@pytest.mark.parametrize(
    ("mesh", "arguments", "expected"),
    [
        ("2x2x1x2", {"num_replicas": 3}, "0000|0001|1000"),
        ("2x2x1x2", {"num_replicas": 8}, "0000|0001|1000|1001|0100|0101|1100|1101"),
        (
            "2x2x1x2",
            {"computation_shape": [1, 1, 1, 2], "num_replicas": 4},
            "0000,0001|1000,1001|1100,1101|0100,0101",
        ),
        (
            "2x2x1x2",
            {"computation_shape": [2, 2, 1, 2]},
            "0000,0001,1000,1001,1100,1101,0100,0101",
        ),
        (
            "4x1x1x1",
            {
                "computation_shape": [2, 1, 1, 1],
                "computation_stride": [2, 1, 1, 1],
                "num_replicas": 2,
            },
            "0000,2000|1000,3000",
        ),
        ("3x2x1x1", {"num_replicas": 6}, "0000|1000|2000|0100|1100|2100"),
    ],
)
def test_written_out_cases(mesh: str, arguments: dict[str, Any], expected: str) -> None:
    assert _text(DeviceAssignment.build(_topology(_sizes(mesh)), **arguments)) == expected


meshes = st.lists(st.integers(1, 4), min_size=3, max_size=3).flatmap(
    lambda chips: st.sampled_from([1, 2]).map(lambda cores: [*chips, cores])
)


@given(meshes, st.data())
def test_every_core_belongs_to_one_replica_at_most(mesh: list[int], data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, size)) for size in mesh]
    stride = [data.draw(st.integers(1, m // s)) for m, s in zip(mesh, shape, strict=True)]
    blocks = [m // (s * d) * d for m, s, d in zip(mesh, shape, stride, strict=True)]
    num_replicas = data.draw(st.integers(1, int(np.prod(blocks))))
    built = DeviceAssignment.build(_topology(mesh), shape, stride, num_replicas)
    places = built.core_assignment.reshape(-1, 4)
    assert len(np.unique(places, axis=0)) == len(places) == num_replicas * int(np.prod(shape))
    # All replicas have the same form: the set of distances from their lowest core.
    forms = [{tuple(c) for c in (r - r.min(0)).tolist()} for r in built.core_assignment]
    assert all(form == forms[0] for form in forms)
