"""The expected time of a step: what its schedule overlaps, at the efficiencies of the chip."""

import dataclasses

from jaxdist import hlo
from jaxdist._mesh import ReplicaMesh
from jaxdist._reports import Expected
from jaxdist.cost import EFFICIENCY, Chip, Efficiency, Link, collective_seconds, links_of

# Note [Expected times]
# The bounds and the prediction of a plan use published peaks. The expected time uses the parts of
# these peaks that programs reach (`cost.EFFICIENCY`), instruction by instruction, and hides the
# communication that the schedule of the compiled program hides. Compiled programs for GPUs have no
# such efficiencies here, so their plans have no expected time.


def predict_expected(
    text: str,
    layout: ReplicaMesh,
    device: Chip,
    *,
    efficiency: Efficiency = EFFICIENCY,
    num_slices: int | None = None,
) -> Expected:
    """Return the expected time of a compiled program for TPUs. See Note [Expected times].

    Args:
        text: Its text.
        layout: The mesh that it is compiled for.
        device: The peaks of one device.
        efficiency: The parts of the peaks that it reaches.
        num_slices: Another number of slices, two or more, for a program of two or more. Programs
            for these differ only in the groups of collectives between slices.
    """
    links = links_of(layout)
    inner, across = (
        _reach(links.inner, efficiency.ici),
        _reach(links.across, efficiency.dcn),
    )

    def time_collective(c: hlo.CompiledCollective) -> tuple[str, float]:
        size = max(c.bytes_per_device, c.operand_bytes)
        n = c.group_size
        if c.between_slices and num_slices is not None:
            n = num_slices
        if c.kind == "collective-permute":
            n = max(n, 2)
        link = across if c.between_slices else inner
        seconds = collective_seconds(c.kind, n, size, link, c.operands, max(1, len(c.groups)))
        return "DCN" if c.between_slices else "ICI", seconds

    def time_work(done: hlo.Work) -> float:
        return max(
            done.flops / (device.flops * efficiency.matrix),
            done.memory_bytes / (device.hbm_bytes_per_second * efficiency.hbm),
        )

    found = hlo.schedule(text, time_collective, time_work)
    waits = dict(found.waits)
    # A wait for a copy between memories is a part of the work of the chip.
    work = found.work + waits.pop("HBM", 0.0)
    return Expected(work, waits.get("ICI", 0.0), waits.get("DCN", 0.0))


def _reach(link: Link, part: float) -> Link:
    return dataclasses.replace(link, bytes_per_second=link.bytes_per_second * part)
