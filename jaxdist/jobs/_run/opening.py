"""Describes a run, before its first step."""

import math
from typing import Any

import jax
from flax import nnx

from jaxdist._program import Program
from jaxdist._strategies import Strategy
from jaxdist._values import from_state, is_sharded_leaf
from jaxdist.jobs._config.schema import JobConfig
from jaxdist.jobs._task import Task

# The usual names of collectives whose primitives have other names.
_WORDS = {"psum": "all-reduce", "psum_scatter": "reduce-scatter", "ppermute": "permute"}


def describe_run(config: JobConfig, task: Task[Any], strategy: Strategy, model: nnx.Module) -> str:
    """Describe the model and the devices of a run.

    For instance: topics: 271,456 parameters on 4 replica(s) of 2 cpu device(s), 32 windows a step.
    """
    mesh = strategy.mesh.devices
    count = strategy.num_replicas_in_sync
    # With `deterministic`, several virtual replicas share a device.
    share = f"{mesh.size // count} " if mesh.size >= count else f"1/{count // mesh.size} "
    return (
        f"{task.title}: {count_parameters(model):,} parameters on {count} replica(s) of {share}"
        f"{mesh.flat[0].platform} device(s), {config.data.batch_size} {task.examples} a step"
    )


def describe_communication(program: Program) -> str:
    """Describe the collectives of a step, by kind.

    For instance: all-reduce of 1,085,956 bytes between 8 replicas.
    """
    totals: dict[str, int] = {}
    for asked in program.traced_collectives:
        # A collective in a loop with an unknown number of iterations counts once.
        kind = _WORDS.get(asked.kind, asked.kind.replace("_", "-"))
        totals[kind] = totals.get(kind, 0) + asked.bytes_per_device * (asked.times or 1)
    layout = program.layout
    if not totals or layout.num_replicas == 1:
        between = "nothing is sent between replicas"
    else:
        listed = ", ".join(f"{kind} of {size:,} bytes" for kind, size in sorted(totals.items()))
        between = f"{listed} between {layout.num_replicas} replicas"
    if layout.num_logical == 1:
        return between
    return f"{between}; and what the compiler adds between the {layout.num_logical} devices of one"


def count_parameters(model: nnx.Module) -> int:
    """Return the number of elements of all parameters."""
    state = nnx.state(model, nnx.Param)
    leaves = jax.tree.leaves(state, is_leaf=is_sharded_leaf)
    return sum(math.prod(from_state(leaf).shape) for leaf in leaves)
