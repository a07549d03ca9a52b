"""What `explain` shows of a pipeline."""

from collections.abc import Mapping

from jaxdist import _pipeline


def list_facts(
    schedule: str, table: _pipeline.Table, kept: Mapping[str, _pipeline.Kept], *, splits_head: bool
) -> Mapping[str, str]:
    """Return what a pipeline does, by name.

    Args:
        schedule: The name of the schedule.
        table: Its table.
        kept: What a stage keeps, by kind.
        splits_head: Whether all stages compute the head together.
    """
    stages, micro_batches, chunks = table.stages, table.micro_batches, table.chunks
    # Inputs have one more slot, for what nobody needs; each holds what one stage sends.
    num_bytes = kept["inputs"].nbytes // (kept["inputs"].slots + 1)
    permutes = sum(
        count * (("F" in kinds) + bool({*kinds} & {*"BI"})) for kinds, count in table.counts.items()
    )
    head = "whole on each stage; all stages wait for it"
    if splits_head:
        count = micro_batches / stages
        heads = "1 head" if count == 1 else f"{count:g} heads"
        head = f"split over the stages: {heads} instead of {micro_batches}"
    in_chunks = f" x {chunks} chunks" if chunks > 1 else ""
    facts = {
        "schedule": f"{schedule}, {stages} stages{in_chunks} x {micro_batches} micro-batches",
        "ticks": ", ".join(f"{count} {kinds}" for kinds, count in table.counts.items()),
        "waiting": f"{table.bubble():.1%} of the working time; {table.bubble(_WITH_REMAT):.1%} "
        "with jax.checkpoint",
        **{
            f"{name} kept": f"{size.slots} on a stage, {size.nbytes:,} bytes"
            for name, size in kept.items()
            if size.slots
        },
        "sent to a neighbour": f"at most {permutes} times {num_bytes:,} bytes",
        "head": head,
    }
    if micro_batches < stages:
        facts["better"] = f"micro_batches={stages} or more, so that every stage has work"
    return facts


# Forward, whole backward, and its halves, where the backward computes the forward again.
_WITH_REMAT = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}
