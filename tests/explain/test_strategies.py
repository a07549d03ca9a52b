"""`explain` of strategies: owners of replicas, topologies with links, and compilations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.cluster_resolver import TPUClusterResolver
from tests.parameter_server.strategy.making import make_strategy


def explained(strategy: jaxdist.Strategy) -> Any:
    report = jaxdist.explain(strategy)
    assert type(report).__name__ == "StrategyReport"
    return report


def test_devices_mesh_and_owner_are_those_of_the_strategy() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    report = explained(jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",)))
    assert [[d.id for d in row.devices] for row in report.replicas] == [
        [int(d.id) for d in row] for row in mesh.devices
    ]
    text = str(report)
    assert text.startswith(
        "MirroredStrategy: 4 replicas x 2 logical devices on 8 cpu devices of 1 process"
    )
    assert "Mesh: data = 4 (replicas), model = 2 (logical devices)" in text
    assert "  2        0 (this one)  cpu:4 to 5" in text


def test_each_replica_is_shown_with_its_process() -> None:
    strategy = jaxdist.MirroredStrategy()
    second = dataclasses.replace(strategy.layout.process, index=1, count=2)
    owners = (0, 0, 0, 0, 1, 1, 1, 1)
    layout = dataclasses.replace(strategy.layout, process=second, owners=owners)
    shared = object.__new__(type(strategy))
    vars(shared).update(vars(strategy))
    shared.layout = layout
    report = explained(shared)
    assert [row.process for row in report.replicas] == list(layout.replica_owners)
    assert "of 2 processes" in str(report)
    assert "  3        0             cpu:3" in str(report)
    assert "  4        1 (this one)  cpu:4" in str(report)


def test_virtual_replicas_share_devices() -> None:
    report = explained(jaxdist.MirroredStrategy(["cpu:0", "cpu:1"], deterministic=4))
    assert [[d.id for d in row.devices] for row in report.replicas] == [[0], [0], [1], [1]]
    assert str(report).startswith("MirroredStrategy: 4 virtual replicas x 1 logical device on 2 ")


def test_chips_have_the_coordinates_of_the_assignment_and_links_to_neighbours() -> None:
    strategy = jaxdist.TPUStrategy(TPUClusterResolver("virtual:v5e:2x4"))
    report = explained(strategy)
    assert report.chips is not None
    cores = strategy._assignment.core_assignment
    assert [row.chips for row in report.replicas] == [
        tuple(map(tuple, of.tolist())) for of in cores
    ]
    places = sorted(p[:3] for p in report.chips.replicas)
    near = {
        (a, b)
        for a in places
        for b in places
        if sum(abs(i - j) for i, j in zip(a, b, strict=True)) == 1 and a < b
    }
    assert {*report.chips.links} == near
    assert "Topology: 8 chips (2 x 4 x 1) of 1 core, 10 links between neighbours" in str(report)
    assert "\n    2 -- 3\n" in str(report)


def test_slices_have_no_links_between_them() -> None:
    strategy = jaxdist.TPUStrategy(TPUClusterResolver("virtual:v5e:2x2*2"))
    found = explained(strategy).chips
    assert found is not None
    assert found.num_slices == 2
    assert len(found.links) == 2 * 4
    assert all(a[2] == b[2] for a, b in found.links)
    cube = jaxdist.TPUStrategy(TPUClusterResolver("described:v5p:2x2x2"))
    assert len(explained(cube).chips.links) == 12


def test_a_described_slice_has_chips_of_several_processes() -> None:
    pytest.importorskip("libtpu")
    report = explained(jaxdist.TPUStrategy(TPUClusterResolver("described:v4:2x2x2")))
    assert report.chips is not None
    assert report.chips.shape == (2, 2, 2, 2)
    assert {row.process for row in report.replicas} == {0, 1}
    assert "is a description" in str(report)
    # The devices of a mesh say where they are, too.
    mesh = jax.sharding.Mesh(np.array([r.devices[0] for r in report.replicas]), ("data",))
    by_mesh = explained(jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",)))
    assert by_mesh.chips == report.chips


def test_compilations_say_which_argument_changed() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(x: jax.Array, flag: bool = True) -> jax.Array:
        return x if flag else -x

    options = jaxdist.RunOptions(static_argnames=("flag",))
    assert "Compiled so far: nothing" in str(explained(strategy))
    for rows in (2, 2, 3):
        strategy.run(step, (jnp.ones(rows),), options=options)
    strategy.run(step, (jnp.ones(3, jnp.int32),), options=options)
    strategy.run(step, (jnp.ones(3, jnp.int32),), {"flag": False}, options=options)
    report = explained(strategy)
    assert [c.why for c in report.compilations[:3]] == [
        None,
        "args[0]: mirrored float32[2] -> mirrored float32[3]",
        "args[0]: mirrored float32[3] -> mirrored int32[3]",
    ]
    assert len(report.compilations) == 4
    assert {c.function for c in report.compilations} == {"step"}
    [found] = report.findings
    assert found.kind == "compilation"
    assert "was compiled 4 times" in found.what
    assert "4 programs are 1" in found.remedy


@pytest.mark.filterwarnings("ignore::jaxdist.errors.RetraceWarning")
def test_functions_that_one_line_makes_are_counted() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    for _ in range(3):
        strategy.run(lambda x: x + 1, (1.0,))
    report = explained(strategy)
    [found] = report.findings
    assert "was compiled for 3 function objects" in found.what
    assert "1 program for 3" in found.remedy
    [row] = [line for line in str(report).splitlines() if line.startswith("  <lambda>")][:1]
    assert row.split()[-4:] == ["3", "the", "first", "call"]


def test_a_parameter_server_strategy_says_where_its_variables_are() -> None:
    report = explained(make_strategy())
    assert "Variables are on the parameter servers" in str(report)
    assert str(report).startswith("ParameterServerStrategy: ")
