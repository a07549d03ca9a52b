"""Who owns which replica: what each of four processes finds, joined, is what one process has."""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import jaxdist
from jaxdist import PerReplica, tpu
from jaxdist import _mesh as meshes
from jaxdist._called import called
from jaxdist._collectives.cross_device.all_reduce import choose_hierarchical
from jaxdist._devices import chips
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Process
from jaxdist._strategies.across.local import list_results, make_from_function
from jaxdist._strategies.over_processes import check_one_process
from jaxdist._values import find_shapes
from jaxdist._values.replicas.placement import placement_of_sharding
from jaxdist.data import ValueContext
from jaxdist.errors import ArgumentError, ContextError, SeveralProcessesError
from tests.processes.views import OWNERS, some_owners, view_from, views
from tests.strategies.oracle import refused
from tests.tables import examples

each_ownership = pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)


def _by_device(layout: ReplicaMesh, owners: Sequence[int]) -> dict[jax.Device, int]:
    """The owner of each device, without the mesh's own answer: devices are listed by replica."""
    return dict(zip(layout.devices, owners, strict=True))


@settings(deadline=None, max_examples=examples(60))
@given(
    owners=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    num_logical=st.sampled_from([1, 2, 4, 8]),
    is_virtual=st.booleans(),
)
def test_each_replica_is_local_to_the_owner_of_its_first_device_and_to_no_other(
    owners: list[int], num_logical: int, is_virtual: bool
) -> None:
    layout = meshes.build(jax.devices(), num_logical=num_logical)
    if is_virtual:
        layout = dataclasses.replace(layout, num_virtual=2 * layout.num_replicas)
    expected: dict[int, list[int]] = collections.defaultdict(list)
    for replica in range(layout.num_replicas):
        first = layout.device_grid[replica, 0]
        expected[_by_device(layout, owners)[first]].append(replica)
    for index, view in enumerate(views(layout, owners)):
        assert view.local_replicas == tuple(expected[index])
        assert view.is_local == (set(owners) == {index})
        assert [view.replica_owners[r] for r in view.local_replicas] == [index] * len(
            view.local_replicas
        )


def test_owners_of_a_users_mesh_follow_the_replicas_not_the_axes_of_the_mesh() -> None:
    devices = np.asarray(jax.devices(), dtype=object).reshape(2, 4)
    layout = meshes.adopt(Mesh(devices, ("model", "data")), "data")
    # Replica r has the devices r and r + 4.
    seen = views(layout, (0, 3, 1, 0, 2, 2, 3, 3))
    assert [view.local_replicas for view in seen] == [(0,), (1,), (2,), (3,)]
    assert [view.is_local for view in seen] == [False] * 4
    assert [seen[1].device_owners[d] for d in jax.devices()[:5]] == [0, 1, 2, 3, 3]


def test_a_replica_over_the_devices_of_two_processes_is_not_local_to_the_first() -> None:
    layout = meshes.build(jax.devices()[:2], num_logical=2)
    first, second, *_ = views(layout, (0, 1))
    assert (first.local_replicas, second.local_replicas) == ((0,), ())
    assert not first.is_local


@each_ownership
def test_layouts_of_arrays_are_the_same_in_every_process(owners: tuple[int, ...]) -> None:
    layout = meshes.build(jax.devices(), num_logical=2)
    for view in views(layout, owners):
        assert view.per_replica == layout.per_replica
        assert view.replicated == layout.replicated
        assert view.tiles((1, 2)) == layout.tiles((1, 2))
        assert view.replica_mesh(3) == layout.replica_mesh(3)
        assert (view.device_grid == layout.device_grid).all()
        found = placement_of_sharding(layout.per_replica, 2, view)
        assert found == placement_of_sharding(layout.per_replica, 2, layout)


def test_meshes_are_equal_if_they_have_the_same_process_and_owners() -> None:
    layout = meshes.build(jax.devices())
    first, second, *_ = views(layout, OWNERS["2+2+2+2"])
    again = view_from(meshes.build(jax.devices()), 0, OWNERS["2+2+2+2"])
    assert first == again
    assert hash(first) == hash(again)
    assert len({first, again, second, layout, view_from(layout, 0, OWNERS["3+1+2+2"])}) == 4
    assert dataclasses.replace(layout, process=Process(0, 1)) == layout


@each_ownership
def test_each_process_lists_the_copies_of_its_own_replicas(owners: tuple[int, ...]) -> None:
    layout = meshes.build(jax.devices())
    array = jax.device_put(np.arange(3.0), layout.replicated)
    everything = [copy.device for copy in list_results(array, layout)]
    listed = [list_results(array, view) for view in views(layout, owners)]
    for index, copies in enumerate(listed):
        own = [d for d, owner in zip(everything, owners, strict=True) if owner == index]
        assert [copy.device for copy in copies] == own
        assert all(np.array_equal(copy, np.arange(3.0)) for copy in copies)
    assert sum(map(len, listed)) == 8


@settings(deadline=None, max_examples=examples(30))
@given(owners=some_owners)
def test_values_made_by_each_process_joined_are_those_that_one_process_makes(
    owners: list[int],
) -> None:
    layout = meshes.build(jax.devices())

    def make(context: ValueContext) -> int:
        return 100 * context.num_replicas_in_sync + context.replica_id_in_sync_group

    joined = {}
    for view in views(layout, owners):
        values = make_from_function(make, view, unwrap=False).values
        joined |= dict(zip(view.local_replicas, values, strict=True))
    assert (
        tuple(joined[r] for r in range(8)) == make_from_function(make, layout, unwrap=False).values
    )


@pytest.mark.parametrize(
    ("owners", "hosts", "most", "group"),
    [
        (OWNERS["2+2+2+2"], 4, 2, 2),
        (OWNERS["3+1+2+2"], 4, 3, 4),  # workers of different sizes: the two halves are a guess
        ((0, 0, 0, 0, 3, 3, 3, 3), 2, 4, 4),
        (OWNERS["in turn"], 4, 2, 4),  # likewise, since no worker's replicas are neighbours
    ],
)
def test_hosts_and_groups_of_replicas_are_those_of_the_owners_in_every_process(
    owners: tuple[int, ...], hosts: int, most: int, group: int
) -> None:
    strategy = jaxdist.MirroredStrategy()
    for view in views(strategy.layout, owners):
        extended = strategy._on(view).extended
        assert (extended.num_hosts, extended.num_replicas_per_host) == (hosts, most)
        assert getattr(choose_hierarchical(view), "local", 0) == group


def test_one_process_writes_checkpoints_unless_each_has_a_model_of_its_own() -> None:
    strategy = jaxdist.MirroredStrategy()

    def writers(owners: list[tuple[int, ...]]) -> list[bool]:
        seen = [view_from(strategy.layout, index, own) for index, own in enumerate(owners)]
        return [bool(strategy._on(view).extended.should_checkpoint) for view in seen]

    assert writers([OWNERS["3+1+2+2"]] * 4) == [True, False, False, False]
    assert writers([(index,) * 8 for index in range(4)]) == [True] * 4


@called("MirroredStrategy")
def test_a_strategy_of_one_process_names_the_processes_that_own_its_other_devices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = meshes.build(jax.devices())
    view = view_from(layout, 2, OWNERS["3+1+2+2"])
    with refused(SeveralProcessesError, "process(es) [0, 1, 3]", "process 2 of 4"):
        check_one_process(view, were_chosen=True)
    own = view_from(layout, 2, (2,) * 8)
    with refused(SeveralProcessesError, "MirroredStrategy() was made in process 2", "4 processes"):
        check_one_process(own, were_chosen=False)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        check_one_process(own, were_chosen=True)
    assert "process 2 of a job of 4 processes" in caplog.text


@pytest.mark.parametrize("name", ["v5e:4x4", "v4:2x2x4"])
@pytest.mark.parametrize("num_logical", [1, 2])
def test_replicas_of_a_described_slice_belong_to_the_hosts_of_their_chips(
    name: str, num_logical: int
) -> None:
    slice_of = tpu.slice_of(name)
    layout = meshes.build(
        chips.describe_slice(slice_of.name, 1), num_logical=num_logical, described=name
    )
    hosts = [core.process_index for core in slice_of.cores][::num_logical]
    assert layout.process == Process(0, 4)
    for index, view in enumerate(views(layout, None)):
        assert view.local_replicas == tuple(r for r, host in enumerate(hosts) if host == index)
        assert not view.is_local
    assert view_from(layout, 0, None) == layout


def test_the_mesh_of_a_description_does_not_ask_which_process_this_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Process:
        raise AssertionError("this starts JAX")

    monkeypatch.setattr(meshes, "get_current_process", refuse)
    layout = meshes.build(chips.describe_slice("v5e:2x4", 1), described="v5e:2x4")
    assert (layout.process, layout.local_replicas) == (Process(0, 2), (0, 1, 2, 3))
    with pytest.raises(AssertionError, match="starts JAX"):
        meshes.build(jax.devices())


@pytest.mark.parametrize("owners", [(), (0,) * 7, (0,) * 9, (4,) + (0,) * 7, (-1,) + (0,) * 7])
def test_owners_are_processes_of_the_job_one_for_each_device(owners: Any) -> None:
    layout = meshes.build(jax.devices())
    with refused(ArgumentError, f"owners={owners}", "8 devices of 4", "8 numbers from 0 to 3"):
        view_from(layout, 0, owners)


def test_shapes_that_no_other_process_can_tell_are_an_error() -> None:
    layout = view_from(meshes.build(jax.devices()), 1, OWNERS["2+2+2+2"])
    value = PerReplica([np.ones(2), np.ones(3)])
    with refused(ContextError, "the shapes of x", "has joined none", "jax.distributed.initialize"):
        find_shapes("x", value, layout)
