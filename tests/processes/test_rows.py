"""The rows that each process reads, joined over the processes, are those that one process reads."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist import _mesh as meshes
from jaxdist import tpu
from jaxdist._devices import chips
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement
from jaxdist._values import agreed_shapes
from jaxdist.data import (
    AutoShardPolicy,
    InputContext,
    PartialBatch,
    batches,
    distribute_datasets_from_function,
)
from jaxdist.errors import ArgumentError, ShapeError
from tests.processes.job import results_of_job
from tests.processes.reading import Steps, group, host_options, read_all_ways, read_in_a_job, split
from tests.processes.threads import run_well
from tests.processes.views import OWNERS, some_owners, view_from, views
from tests.strategies.oracle import refused
from tests.tables import examples

same_shapes = st.sampled_from([PartialBatch.PAD, PartialBatch.DROP])


def _check_joined(parts: list[tuple[ReplicaMesh, Steps]], whole: Steps) -> None:
    """The values of all processes, put in the order of the replicas, are those of one process."""
    for view, steps in parts:
        assert len(steps) == len(whole)
        for own, everything in zip(steps, whole, strict=True):
            for leaf, of_all in zip(own, everything, strict=True):
                expected = [of_all.values[r] for r in view.local_replicas]
                assert len(leaf.values) == len(expected)
                for value, wanted in zip(leaf.values, expected, strict=True):
                    np.testing.assert_array_equal(value, wanted)
    numbers = sorted(r for view, _ in parts for r in view.local_replicas)
    assert numbers == list(range(parts[0][0].num_replicas))


@settings(deadline=None, max_examples=examples(60))
@given(owners=some_owners, rows=st.integers(1, 60), size=st.integers(1, 33), policy=same_shapes)
def test_rows_of_global_batches_joined_over_processes_are_those_of_one_process(
    owners: list[int], rows: int, size: int, policy: PartialBatch
) -> None:
    layout = meshes.build(jax.devices())
    options = host_options(policy)
    try:
        whole = split(layout, rows, size, options)
    except ShapeError as error:
        # Everything was dropped, and every process says so.
        for view in views(layout, owners):
            with refused(ShapeError, str(error)):
                split(view, rows, size, options)
        return
    _check_joined([(v, split(v, rows, size, options)) for v in views(layout, owners)], whole)
    if policy is PartialBatch.PAD:
        # Against the examples themselves: each one is real exactly once, in order.
        real = [
            np.concatenate(step[0].values)[np.concatenate(step[2].values)].tolist()
            for step in whole
        ]
        assert list(itertools.chain.from_iterable(real)) == list(range(rows))


@settings(deadline=None, max_examples=examples(40))
@given(
    owners=some_owners,
    rows=st.integers(8, 60),  # each of 8 pipelines has some
    size=st.integers(1, 9),
    per_replica=st.booleans(),
    policy=st.sampled_from([PartialBatch.PAD, PartialBatch.UNEVEN]),
)
def test_elements_of_a_function_joined_over_processes_are_those_of_one_process(
    owners: list[int], rows: int, size: int, per_replica: bool, policy: PartialBatch
) -> None:
    layout = meshes.build(jax.devices())
    options = host_options(policy, per_replica=per_replica)

    # In one process each replica gets what it would get of the pipeline of its process.
    def read(context: InputContext) -> Any:
        replica = context.input_pipeline_id
        if per_replica:
            return batches(np.arange(rows)[replica::8], size)
        of_process = [r for r, owner in enumerate(owners) if owner == owners[replica]]
        own = list(batches(np.arange(rows)[owners[replica] :: 4], size))
        return own[of_process.index(replica) :: len(of_process)]

    alone = host_options(policy, per_replica=True)
    whole = [[step] if policy is PartialBatch.UNEVEN else [*step]
             for step in distribute_datasets_from_function(read, layout, alone)]  # fmt: skip

    def work(view: ReplicaMesh, agreement: Agreement) -> tuple[ReplicaMesh, Steps]:
        steps, asked = group(view, rows, size, options, agreement)
        own = [(8, r, 8) for r in view.local_replicas]
        assert asked == (own if per_replica else [(4, view.process.index, 8)])
        return view, steps

    _check_joined(run_well(tuple(owners), work), whole)


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("policy", [PartialBatch.UNEVEN, PartialBatch.PAD])
def test_uneven_batches_joined_over_processes_are_those_of_one_process(
    owners: tuple[int, ...], policy: PartialBatch
) -> None:
    layout, options = meshes.build(jax.devices()), host_options(policy)
    whole = split(layout, 19, 16, options)
    parts = [
        (view, split(view, 19, 16, options))
        for view in views(layout, owners)
        if view.local_replicas
    ]
    _check_joined(parts, whole)
    if policy is PartialBatch.UNEVEN:
        shapes = tuple(v.shape for v in whole[1][1].values)
        assert shapes == ((1, 2),) * 3 + ((0, 2),) * 5
        # Each process knows the shapes of all replicas, also where its own ones are equal.
        assert {agreed_shapes(steps[1][1]) for _, steps in parts} == {shapes}


def test_replicas_that_span_processes_take_one_shape() -> None:
    layout = meshes.build(jax.devices(), num_logical=2)
    view = view_from(layout, 0, OWNERS["in turn"])
    with refused(ShapeError, "processes [0, 1, 2, 3]", "span several", "PAD", "DROP"):
        split(view, 19, 16, host_options(PartialBatch.UNEVEN))
    for policy in (AutoShardPolicy.FILE, AutoShardPolicy.OFF):
        given = host_options(PartialBatch.PAD)._replace(auto_shard_policy=policy)
        with refused(ArgumentError, policy.name, "several processes", "DATA"):
            split(view, 16, 16, given)


def test_a_mesh_of_one_process_of_several_takes_uneven_batches() -> None:
    view = view_from(meshes.build(jax.devices()[:4]), 2, (2,) * 4)
    values = split(view, 6, 6, host_options(PartialBatch.UNEVEN))[0][0].values
    assert [v.tolist() for v in values] == [[0, 1], [2, 3], [4, 5], []]


def test_rows_of_a_described_slice_go_to_the_hosts_of_its_chips() -> None:
    slice_of = tpu.slice_of("v5e:4x4")
    layout = meshes.build(chips.describe_slice(slice_of.name, 1), described=slice_of.name)
    hosts = [core.process_index for core in slice_of.cores]
    for view in views(layout, None):
        ((x, _),) = split(view, 32, 32, host_options(PartialBatch.UNEVEN))
        own = [r for r, host in enumerate(hosts) if host == view.process.index]
        assert len(own) == 4
        assert [v.tolist() for v in x.values] == [[2 * r, 2 * r + 1] for r in own]


def test_two_real_processes_get_what_two_views_of_one_mesh_get() -> None:
    expected = run_well((0, 0, 1, 1), read_all_ways)
    for rank, (index, count, local, read) in enumerate(results_of_job(read_in_a_job, 2, devices=2)):
        assert (index, count, local) == (rank, 2, (2 * rank, 2 * rank + 1))
        assert read == expected[rank]
    assert expected[0] != expected[1]
