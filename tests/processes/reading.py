"""Ways to read, for tests that compare what processes read; also run in processes of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._values import PerReplica
from jaxdist.data import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    PartialBatch,
    batches,
    distribute_dataset,
    distribute_datasets_from_function,
)
from jaxdist.errors import ShapeError

Steps = list[list[PerReplica]]  # for each step its leaves, with values of the local replicas


def split(layout: ReplicaMesh, rows: int, size: int, options: InputOptions) -> Steps:
    """What a process gets of global batches of `size` rows."""
    source = batches({"x": np.arange(rows), "y": np.arange(2.0 * rows).reshape(rows, 2)}, size)
    return [_leaves(step) for step in distribute_dataset(source, layout, options)]


def group(
    layout: ReplicaMesh,
    rows: int,
    size: int,
    options: InputOptions,
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

    steps = distribute_datasets_from_function(read, layout, options)
    return [_leaves(step) for step in steps], asked


def read_all_ways(layout: ReplicaMesh) -> dict[str, Any]:
    """What a process gets on its devices, as lists of numbers, and what it is refused."""
    pad, uneven = (InputOptions(partial_batch=p) for p in (PartialBatch.PAD, PartialBatch.UNEVEN))
    try:
        refused = str(split(layout, 12, 9, uneven))
    except ShapeError as error:
        refused = str(error)
    return {
        "split": as_lists(split(layout, 13, 8, pad)),
        "split evenly": as_lists(split(layout, 16, 8, uneven)),
        "group": as_lists(group(layout, 13, 2, pad)[0]),
        "device arrays": as_lists(group(layout, 16, 2, uneven, on_device=True)[0]),
        "uneven": refused,
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
