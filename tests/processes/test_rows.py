"""The rows that each process reads, joined over the processes, are those that one process reads."""

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
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
from jaxdist.data import PartialBatch
from jaxdist.errors import ShapeError
from tests.processes.reading import Steps, as_lists, group, host_options, read_all_ways, split
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
)
def test_elements_of_a_function_joined_over_processes_are_those_of_one_process(
    owners: list[int], rows: int, size: int, per_replica: bool
) -> None:
    layout = meshes.build(jax.devices())
    options = host_options(PartialBatch.PAD, per_replica=per_replica)
    whole, asked = group(layout, rows, size, options)
    assert asked == ([(8, r, 8) for r in range(8)] if per_replica else [(1, 0, 8)])
    parts = []
    for view in views(layout, owners):
        steps, of_this = group(view, rows, size, options)
        assert of_this == asked
        parts.append((view, steps))
    _check_joined(parts, whole)


@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("read", [split, group])
def test_an_uneven_batch_is_refused_alike_in_every_process(
    owners: tuple[int, ...], read: Callable[..., Any]
) -> None:
    options = host_options(PartialBatch.UNEVEN)
    for index in sorted({*owners}):
        view = view_from(meshes.build(jax.devices()), index, owners)
        even, *_ = split(view, 16, 8, options)[1]
        assert [x.tolist() for x in even.values] == [[8 + r] for r in view.local_replicas]
        with refused(ShapeError, f"processes {sorted({*owners})}", "one shape", "PAD", "DROP"):
            read(view, 19, 16 if read is split else 2, options)


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


PROGRAM = """
import json, sys
import jax
from jaxdist import _mesh, _processes
from tests.processes.reading import read_all_ways
jax.config.update("jax_num_cpu_devices", 2)
rank, port = int(sys.argv[1]), sys.argv[2]
_processes.connect(coordinator_address=f"localhost:{port}", num_processes=2, process_id=rank)
layout = _mesh.build(jax.devices())
process = layout.process
print(json.dumps([process.index, process.count, layout.local_replicas, read_all_ways(layout)]))
"""


def _run_two_processes() -> list[Any]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    environment.pop("XLA_FLAGS", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, said) in zip(processes, answers, strict=True):
        assert process.returncode == 0, said
    return [json.loads(said.splitlines()[-1]) for said, _ in answers]


def test_two_real_processes_get_what_two_views_of_one_mesh_get() -> None:
    for rank, (index, count, local, read) in enumerate(_run_two_processes()):
        assert (index, count) == (rank, 2)
        view = view_from(meshes.build(jax.devices()[:4]), rank, (0, 0, 1, 1))
        assert tuple(local) == view.local_replicas
        pad, uneven = host_options(PartialBatch.PAD), host_options(PartialBatch.UNEVEN)
        assert read["split"] == as_lists(split(view, 13, 8, pad))
        assert read["split evenly"] == as_lists(split(view, 16, 8, uneven))
        assert read["group"] == as_lists(group(view, 13, 2, pad)[0])
        assert read["device arrays"] == as_lists(group(view, 16, 2, uneven)[0])
        with pytest.raises(ShapeError) as caught:
            split(view, 12, 9, uneven)
        assert read["uneven"] == str(caught.value)
        assert read != read_all_ways(meshes.build(jax.devices()[:4]))
