"""Ways to read, for tests that compare what processes read; also run in processes of their own."""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import PerReplica
from jaxdist import _mesh as meshes
from jaxdist._called import called
from jaxdist._mesh import ReplicaMesh
from jaxdist._processes import Agreement, join, leave
from jaxdist.data import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)

Steps = list[list[PerReplica]]  # for each step its leaves, with values of the local replicas


def split(
    layout: ReplicaMesh,
    rows: int,
    size: int,
    options: InputOptions,
    agreement: Agreement | None = None,
) -> Steps:
    """What a process gets of global batches of `size` rows."""
    source = batches({"x": np.arange(rows), "y": np.arange(2.0 * rows).reshape(rows, 2)}, size)
    data = distribute_dataset(source, layout, options, agreement=agreement)
    return [_leaves(step) for step in data]


def group(
    layout: ReplicaMesh,
    rows: int,
    size: int,
    options: InputOptions,
    agreement: Agreement | None = None,
    *,
    on_device: bool = False,
) -> tuple[Steps, list[tuple[int, int, int]]]:
    """What a process gets of batches of `size` rows for one replica, and how it was asked for."""
    asked: list[tuple[int, int, int]] = []

    def read(context: InputContext) -> Any:
        number, count = context.input_pipeline_id, context.num_input_pipelines
        asked.append((count, number, context.num_replicas_in_sync))
        own = batches(np.arange(rows)[number::count], size)
        return [jnp.asarray(x) for x in own] if on_device else own

    steps = distribute_datasets_from_function(read, layout, options, agreement=agreement)
    return [_leaves(step) for step in steps], asked


def read_all_ways(layout: ReplicaMesh, agreement: Agreement | None = None) -> dict[str, Any]:
    """What a process gets, as lists of numbers; on its devices, if it was not made up."""
    has_all = agreement is None
    pad, uneven = (
        InputOptions(has_all, partial_batch=p) for p in (PartialBatch.PAD, PartialBatch.UNEVEN)
    )
    given = agreement
    return {
        "split": as_lists(split(layout, 13, 8, pad, given)),
        "split evenly": as_lists(split(layout, 16, 8, uneven, given)),
        "split unevenly": as_lists(split(layout, 12, 9, uneven, given)),
        "group": as_lists(group(layout, 13, 2, pad, given)[0]),
        "group unevenly": as_lists(group(layout, 13, 2, uneven, given)[0]),
        "device arrays": as_lists(group(layout, 16, 2, uneven, given, on_device=has_all)[0]),
    }


def as_lists(steps: Steps) -> Any:
    """The values as lists of numbers."""
    return [[[np.asarray(v).tolist() for v in leaf.values] for leaf in step] for step in steps]


def host_options(policy: PartialBatch, *, per_replica: bool = False) -> InputOptions:
    """Options whose values stay on the host, where a process need not have a device for each."""
    modes = InputReplicationMode
    return InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=modes.PER_REPLICA if per_replica else modes.PER_WORKER,
        partial_batch=policy,
    )


def _leaves(step: Any) -> list[PerReplica]:
    return jax.tree.leaves(step, is_leaf=lambda x: isinstance(x, PerReplica))


@called("test")
def read_in_a_job() -> tuple[int, int, tuple[int, ...], dict[str, Any]]:
    """Join the job of this process, and read all ways."""
    found = json.loads(os.environ["TF_CONFIG"])
    join(found["cluster"]["worker"], found["task"]["index"])
    layout = meshes.build(jax.devices())
    process = layout.process
    read = read_all_ways(layout)
    leave()
    return process.index, process.count, layout.local_replicas, read
