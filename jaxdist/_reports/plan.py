"""The plan of a step on TPUs or GPUs: its needs and its time."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxdist._reports.grid_picture import Places
from jaxdist._reports.parts import DividedWork, Expected, Memory, Times, Traffic, sum_bytes
from jaxdist._reports.picture import Picture
from jaxdist._reports.tables import Block, Report, Table
from jaxdist._reports.words import count, plural, seconds, share, size
from jaxdist.cost import Chip

# The table of memory omits parts that are smaller than this fraction of the arguments.
_SMALL = 1e-3
CAVEAT = (
    "Times are bounds from published peak numbers, and the latencies of a model; nothing of this "
    "was measured."
)


@dataclasses.dataclass(frozen=True, repr=False)
class SlicePlan(Report):
    """The needs of one step on a slice of TPUs, or on GPUs, and its time.

    The step is compiled with the compiler for TPUs or GPUs. All sizes and times are of one device:
    a chip, a core if a chip has two devices, or a GPU.

    Args:
        name: The name of the step.
        topology: The slice, such as `v5p:8x8x8`, or `v5e:4x4*2` for two slices; or the GPUs, such
            as `h100:4x8`.
        chip: The published peaks of a chip.
        devices_per_chip: The number of devices that share a chip.
        num_slices: The number of slices, or of NVLink domains.
        places: The place of each logical device l of each replica r.
        rules: The rule that places the state, if a job was planned with a rule; else "".
        rows_per_replica: Rows of a batch for each replica; None if no argument is per-replica.
        memory: Bytes of one device.
        flops: Operations of matrix products of one device; None if the compiler refused.
        hbm_traffic: Bytes that one device reads and writes.
        traffic: Collectives, by link and kind.
        times: Bounds and prediction; None if the compiler refused.
        expected: The time at the efficiencies of the chip, with what the schedule overlaps; None
            if the compiler refused.
        efficiency: Rows per second of each device, divided by the rows per second of one device
            alone.
        efficiency_note: Why there is no efficiency, or what it is relative to.
        advice: Changes with which the step would fit, or use less memory.
        notes: What the numbers do not include.
        gaps: Parts of the compiled program that were not understood. Because of them, work, bytes
            and times are too small.
        work: The calls that divide their work over an axis: pipelines, attention, experts.

    Example:
        >>> strategy = OneDeviceStrategy("cpu:0")
        >>> program = strategy.lower(lambda w, x: x @ w, (jnp.ones((256, 8)), jnp.ones((4, 256))))
        >>> plan = program.compile_for("v5e:2x2")
        >>> plan.memory.fits, plan.num_chips, plan.flops
        (True, 4, 16384)
    """

    name: str
    topology: str
    chip: Chip
    devices_per_chip: int
    num_slices: int
    places: Places
    rules: str
    rows_per_replica: int | None
    memory: Memory
    flops: int | None
    hbm_traffic: int | None
    traffic: tuple[Traffic, ...]
    times: Times | None
    expected: Expected | None = None
    efficiency: float | None = None
    efficiency_note: str = ""
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    work: tuple[DividedWork, ...] = ()

    @property
    def num_replicas(self) -> int:
        """The number of copies of the step that run together."""
        return self.places.num_replicas

    @property
    def num_logical(self) -> int:
        """The number of devices of one replica."""
        return self.places.num_logical

    @property
    def num_chips(self) -> int:
        """The number of chips of all slices, or of GPUs."""
        return self.places.num_chips

    @property
    def global_rows(self) -> int | None:
        """The rows of a batch, for all replicas."""
        rows = self.rows_per_replica
        return None if rows is None else rows * self.num_replicas

    @property
    def rows_per_second(self) -> float | None:
        """The predicted rows per second, for all replicas."""
        if self.times is None or not self.global_rows or not self.times.predicted:
            return None
        return self.global_rows / self.times.predicted

    def bytes_sent(self, link: str) -> float:
        """Return the least bytes that one device sends in a step over a link.

        Args:
            link: `"ICI"` or `"DCN"` for TPUs, `"NVLink"` or `"network"` for GPUs.
        """
        return sum_bytes(self.traffic, link, self.chip)

    def figure(self, path: str | Path) -> Path:
        """Draw the assignment with a panel for each plane of chips; the suffix gives the format.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A picture cannot be written to the path.
        """
        return self._picture.draw(path)

    @property
    def title(self) -> str:
        """The step and the slice, in one line."""
        rules = f", {self.rules}" if self.rules else ""
        return (
            f"Plan of {self.name} for {self.topology}: {plural(self.num_chips, self.places.chip)}, "
            f"{plural(self.num_replicas, 'replica')} x "
            f"{plural(self.num_logical, 'logical device')}{rules}"
        )

    @property
    def _at_least(self) -> str:
        """The words before a number that is too small because of gaps."""
        return "at least " if self.gaps else ""

    @property
    def _picture(self) -> Picture:
        return Picture(self.places, self.title)

    @property
    def _device(self) -> str:
        """The name of one device in the tables."""
        if self.devices_per_chip == 1:
            return self.places.chip
        return f"core, 1/{self.devices_per_chip} of a chip"

    def parts(self) -> Iterator[Block | str]:
        """Yield tables, sentences and the assignment."""
        yield self.title
        if self.gaps:
            yield "Work and times below are too small, since not all of the program is understood:"
            yield from (f"  {gap}" for gap in self.gaps)
        if self.rows_per_replica is not None:
            yield (
                f"A batch has {self.global_rows:,} rows: {self.rows_per_replica:,} for each replica"
            )
        yield self._memory()
        yield self._verdict()
        yield from (f"  {sentence}" for sentence in self.advice)
        if self.times is not None:
            # Without times, the compiler refused the program, so its work is unknown.
            yield from self._work(self.times)
        for divided in self.work:
            yield from divided.lines()
        yield self._picture.grid
        yield from self.notes
        yield CAVEAT

    def _memory(self) -> Table:
        """Return the table of memory."""
        m = self.memory
        rows: list[tuple[str, int | None]] = [
            ("parameters", m.parameters),
            ("optimizer", m.optimizer),
            ("other state", m.other_state),
            ("batch", m.batch),
            ("padding of these", m.padding),
            ("new state and results", m.results),
            ("activations and other temporaries", m.temporaries),
            ("program", m.program),
            ("peak", m.peak),
            ("there is", m.limit),
        ]
        return Table(
            f"Memory of a {self._device}",
            ("what", "size", "part"),
            tuple(
                (name, "?" if n is None else size(n), "" if n is None else share(n / m.limit))
                for name, n in rows
                # The peak is always listed, since the verdict below it refers to it.
                if n is None or n > _SMALL * m.arguments or name == "peak"
            ),
            frozenset({"size", "part"}),
        )

    def _verdict(self) -> str:
        """Return the sentence that says whether the step fits."""
        m = self.memory
        if m.fits:
            return "It fits."
        needs = "more" if m.peak is None else size(m.peak)
        return f"It does not fit: it needs {needs}, and there is {size(m.limit)}."

    def _work(self, times: Times) -> Iterator[Table | str]:
        """Yield the table of bounds and the sentences about work and time."""
        flops, moved = self.flops or 0, self.hbm_traffic or 0
        devices = self.num_replicas * self.num_logical
        per_chip = flops * self.devices_per_chip
        yield (
            f"Work of a step: {self._at_least}{count(flops * devices, 'FLOP')} of matrix products, "
            f"{count(per_chip, 'FLOP')} on each {self.places.chip}"
        )
        if self.traffic:
            yield self._collectives()
        else:
            yield "It has no collectives."
        # The work is of one device, which has only a part of the chip's peaks.
        peaks = self.chip.per_device(self.devices_per_chip)
        inner, outer = self.chip.links
        # Products of several dtypes have several peaks.
        rate = flops / times.compute if times.compute else peaks.flops
        rows = [
            ("compute", count(flops, "FLOP"), count(rate, "FLOP/s"), times.compute),
            ("HBM", size(moved), count(peaks.hbm_bytes_per_second, "B/s"), times.hbm),
        ]
        rates = (peaks.inner_bytes_per_second, peaks.outer_bytes_per_second)
        for link, rate, time in zip((inner, outer), rates, (times.inner, times.outer), strict=True):
            # A single slice or domain sends nothing over the network.
            if link == inner or self.num_slices > 1:
                rows.append((link, size(self.bytes_sent(link)), count(rate, "B/s"), time))
        yield Table(
            "A step takes at least",
            ("by", "of a device", "at", "time"),
            tuple((by, of, at, seconds(t)) for by, of, at, t in rows),
            frozenset({"of a device", "at", "time"}),
        )
        rate_of_rows = self.rows_per_second
        per_second = f", {rate_of_rows:,.0f} rows/s" if rate_of_rows else ""
        yield (
            f"Predicted: {self._at_least}{seconds(times.predicted)} a step{per_second}: "
            f"{seconds(max(times.compute, times.hbm))} of work and {seconds(times.collectives)} of "
            f"collectives; at least {seconds(times.bound)}, by {times.bound_by}"
        )
        if self.expected is not None:
            yield self._expectation(self.expected)
        if self.efficiency is not None:
            yield f"Scaling efficiency: {share(self.efficiency)} {self.efficiency_note}"
        elif self.efficiency_note:
            yield f"Scaling efficiency: unknown, {self.efficiency_note}"

    def _expectation(self, expected: Expected) -> str:
        """Return the sentence of the expected time."""
        inner, outer = self.chip.links
        waits = [f"{seconds(expected.inner)} of waits for {inner}"]
        if self.num_slices > 1:
            waits.append(f"{seconds(expected.outer)} of waits for {outer}")
        return (
            f"Expected: {self._at_least}{seconds(expected.seconds)} a step, with the overlap of "
            "the schedule and the efficiencies of the chip (cost.efficiency_of): "
            f"{seconds(expected.work)} of work, "
            f"{' and '.join(waits)}"
        )

    def _collectives(self) -> Table:
        """Return the table of collectives."""
        # The axis says something new only where the mesh has several.
        has_axes = len({axis for row in self.traffic for axis in row.axes}) > 1
        names = ("link", "kind", "axis", "runs", "bytes", "a device sends", "devices", "predicted")
        return Table(
            "Collectives of a step",
            tuple(name for name in names if has_axes or name != "axis"),
            tuple(
                (
                    row.link,
                    row.kind,
                    *([" x ".join(row.axes)] if has_axes else []),
                    f"{row.runs:,}",
                    size(row.num_bytes),
                    size(row.bytes_sent),
                    f"{row.groups:,} x {row.devices:,}" if row.groups > 1 else f"{row.devices:,}",
                    seconds(row.seconds),
                )
                for row in self.traffic
            ),
            frozenset({"runs", "bytes", "a device sends", "predicted"}),
        )
