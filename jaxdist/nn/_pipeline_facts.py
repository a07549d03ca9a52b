"""What `explain` shows of a pipeline."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxdist import _pipeline


def list_facts(
    schedule: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    x: Any,
    *,
    has_split_head: bool,
) -> Mapping[str, str]:
    """Return what a pipeline does, by name.

    Args:
        schedule: The name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Number of chunks of each stage.
        x: Shapes and dtypes of what one stage sends to the next one, for a micro-batch.
        has_split_head: Whether all stages compute the head together.
    """
    table = _pipeline.SCHEDULES[schedule](stages, micro_batches, chunks)
    slots = _pipeline.find_slots(table).sizes
    kept = f"residuals of {slots['r']} of {micro_batches * chunks} micro-batches"
    if chunks > 1:
        kept += ", each of one chunk"
    if slots["d"]:
        kept += f"; {slots['d']} gradients of weights wait"
    num_bytes = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(x))
    ticks = ", ".join(f"{count} {kinds}" for kinds, count in table.counts.items())
    permutes = sum(
        count * (("F" in kinds) + bool({*kinds} & {*"BI"})) for kinds, count in table.counts.items()
    )
    head = "whole on each stage; all stages wait for it"
    if has_split_head:
        head = f"split over the stages: {micro_batches / stages:g} heads instead of {micro_batches}"
    facts = {
        "schedule": f"{schedule}, {stages} stages x {chunks} chunk(s) x {micro_batches} "
        "micro-batches",
        "ticks": ticks,
        "waiting": f"{table.bubble():.1%} of the working time; {table.bubble(_WITH_REMAT):.1%} "
        "with jax.checkpoint",
        "kept on a stage": kept,
        "sent to a neighbour": f"at most {permutes} times {num_bytes:,} bytes",
        "head": head,
    }
    if chunks > 1 and micro_batches % stages:
        near = micro_batches + stages - micro_batches % stages
        facts["better"] = (
            f"micro_batches={near}: with chunks, {stages} divides it, and stages wait less"
        )
    return facts


# Forward, whole backward, and its halves, where the backward computes the forward again.
_WITH_REMAT = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0, "H": 0.0}
