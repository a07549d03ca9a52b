"""Predicts the expected time of a step, with overlaps, at the efficiencies of the chip."""

import dataclasses
from collections.abc import Callable

from jaxdist import hlo
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import find_spread, predict_seconds
from jaxdist._reports import Expected
from jaxdist.cost import (
    Chip,
    Efficiency,
    Link,
    collective_seconds,
    efficiency_of,
    exchange_factor,
    links_of,
    worker_of,
)

TimeCollective = Callable[[hlo.CompiledCollective], tuple[str, float]]

# Note [Expected times]
# The bounds and the prediction of a plan use published peaks. The expected time uses the fractions
# of these peaks that programs reach (`cost.EFFICIENCY`), instruction by instruction, and hides the
# communication that the schedule of the compiled program hides. An all-to-all between TPU chips
# takes longer than its bytes over one link, since they go further. On GPUs, NCCL's fraction of
# bandwidth depends on the bytes, so it is in the size curves of the links.


def predict_expected(
    text: str,
    layout: ReplicaMesh,
    device: Chip,
    *,
    efficiency: Efficiency | None = None,
    num_slices: int | None = None,
) -> Expected:
    """Return the expected time of a compiled program. See Note [Expected times].

    Args:
        text: The text of the program.
        layout: The mesh that it is compiled for.
        device: The peaks of one device.
        efficiency: The fractions of the peaks that it reaches; None for those of the chip.
        num_slices: Another number of slices, two or more, for a program of two or more. Programs
            for these differ only in the groups of collectives between slices.
    """
    reached = efficiency_of(device) if efficiency is None else efficiency
    inner, outer = device.links
    if device.platform == "gpu":
        time_collective = _time_over_nccl(layout, device)
    else:
        time_collective = _time_over_wires(layout, device, reached, num_slices)

    def time_work(done: hlo.Work) -> float:
        seconds = max(
            predict_compute(done, device, reached),
            done.memory_bytes / (device.hbm_bytes_per_second * reached.hbm),
        )
        return seconds + reached.kernel_seconds if seconds else 0.0

    found = hlo.schedule(text, time_collective, time_work)
    waits = dict(found.waits)
    # Waiting for a copy between memories is part of the work of the chip.
    work = found.work + waits.pop("HBM", 0.0)
    return Expected(work, waits.get(inner, 0.0), waits.get(outer, 0.0))


def predict_compute(done: hlo.Work, device: Chip, reached: Efficiency | None = None) -> float:
    """Return the time of matrix products, at the peaks or at the given fractions of them."""
    matrix, fp8 = (1.0, 1.0) if reached is None else (reached.matrix, reached.fp8)
    # The TPU compiler writes products that run in bfloat16 as float32.
    if device.platform == "tpu":
        return done.flops / (device.flops * matrix)
    return sum(
        flops / (device.flops_of(dtype) * (fp8 if dtype.startswith("f8") else matrix))
        for dtype, flops in done.flops_by_dtype
    )


def _time_over_wires(
    layout: ReplicaMesh, device: Chip, reached: Efficiency, num_slices: int | None
) -> TimeCollective:
    """Return a function that takes a collective of TPUs, and returns its link and its time."""
    links, devices = links_of(layout), layout.mesh.devices.ravel()
    within, across = _reach(links.inner, reached.ici), _reach(links.across, reached.dcn)
    inner, outer = device.links

    def time_collective(c: hlo.CompiledCollective) -> tuple[str, float]:
        size = max(c.bytes_per_device, c.operand_bytes)
        n = c.group_size
        if c.between_slices and num_slices is not None:
            n = num_slices
        if c.kind == "collective-permute":
            n = max(n, 2)
        link = across if c.between_slices else within
        seconds = collective_seconds(c.kind, n, size, link, c.operands, max(1, len(c.groups)))
        if c.kind in hlo.EXCHANGES and not c.between_slices and c.groups:
            seconds *= exchange_factor([devices[number] for number in c.groups[0]])
        return outer if c.between_slices else inner, seconds

    return time_collective


def _time_over_nccl(layout: ReplicaMesh, device: Chip) -> TimeCollective:
    """Return a function that takes a collective of GPUs, and returns its slowest link and time."""
    links, workers = links_of(layout), [worker_of(d) for d in layout.mesh.devices.ravel()]
    inner, outer = device.links

    def time_collective(c: hlo.CompiledCollective) -> tuple[str, float]:
        size = max(c.bytes_per_device, c.operand_bytes)
        spread = find_spread(c, workers)
        crosses = spread.workers > 1
        return outer if crosses else inner, predict_seconds(
            c, size, crosses, spread, workers, links
        )

    return time_collective


def _reach(link: Link, part: float) -> Link:
    return dataclasses.replace(link, bytes_per_second=link.bytes_per_second * part)
