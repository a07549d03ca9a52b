"""The report of `explain` for a strategy: devices, mesh, owners, topology and compilations."""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxdist import _reports
from jaxdist._explain.draw import draw_strategy
from jaxdist._explain.findings import Finding, show_findings
from jaxdist._explain.replicas import Chips
from jaxdist._explain.shards import name_device, name_devices
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import Compilation
from jaxdist._reports import Block, Report, Table, plural, shorten_source

_MOST_REPLICAS = 16
_MOST_COMPILATIONS = 16


@dataclasses.dataclass(frozen=True)
class ReplicaRow:
    """A replica, its process, and its devices; virtual replicas may share a device."""

    replica: int
    process: int
    devices: tuple[jax.Device, ...]
    chips: tuple[tuple[int, ...], ...] = ()  # x, y, z and core of each device of a TPU


@dataclasses.dataclass(frozen=True, repr=False)
class StrategyReport(Report):
    """The devices of a strategy, its mesh, the process of each replica, and compiled programs.

    Args:
        name: The class of the strategy.
        layout: Its mesh.
        replicas: The replicas.
        compilations: The programs that its `run` compiled, the oldest first.
        chips: The chips and their links; None for devices without coordinates.
        notes: Further sentences.
        findings: Possible improvements.

    Example:
        >>> report = jaxdist.explain(MirroredStrategy(["cpu:0", "cpu:1"]))
        >>> [(row.replica, row.process, len(row.devices)) for row in report.replicas]
        [(0, 0, 1), (1, 0, 1)]
    """

    name: str
    layout: ReplicaMesh
    replicas: tuple[ReplicaRow, ...]
    compilations: tuple[Compilation, ...]
    chips: Chips | None = None
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    def save_png(self, path: str | Path) -> Path:
        """Draw the devices of each replica, and the chips of TPUs with their links.

        Replicas have their colours.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ArgumentError: A picture cannot be written to the path.
        """
        cells = [
            (row.replica, row.process, [name_device(d) for d in row.devices])
            for row in self.replicas
        ]
        return draw_strategy(path, self._title, cells, self._colours, self.chips)

    @property
    def _title(self) -> str:
        layout = self.layout
        replicas = plural(
            layout.num_replicas, "replica" if layout.num_virtual is None else "virtual replica"
        )
        processes = len({*layout.device_owners.values()})
        return (
            f"{self.name}: {replicas} x {plural(layout.num_logical, 'logical device')} on "
            f"{plural(len(layout.devices), layout.platform + ' device')} of "
            + ("1 process" if processes == 1 else f"{processes} processes")
        )

    def parts(self) -> Iterator[Block | str]:
        """Yield tables and sentences."""
        yield self._title
        yield self._mesh()
        kinds = sorted({str(getattr(d, "device_kind", d.platform)) for d in self.layout.devices})
        yield f"Devices: {name_devices(self.layout.devices)}, of the kind {', '.join(kinds)}"
        yield self._replicas()
        if len(self.replicas) > _MOST_REPLICAS:
            yield f"  and {plural(len(self.replicas) - _MOST_REPLICAS, 'replica')} more"
        if self.chips is not None:
            yield self.chips.grid
        yield from self.notes
        if self.compilations:
            yield self._compiled()
        else:
            yield "Compiled so far: nothing"
        more = len({*self.compilations}) - _MOST_COMPILATIONS
        if more > 0:
            yield f"  and {plural(more, 'row')} before these"
        yield from show_findings(self.findings)

    def _mesh(self) -> str:
        shape = self.layout.mesh.shape
        axes = (
            f"{name} = {shape[name]} "
            + ("(replicas)" if name in self.layout.replica_axes else "(logical devices)")
            for name in self.layout.mesh.axis_names
        )
        return f"Mesh: {', '.join(axes)}"

    def _replicas(self) -> Table:
        own = self.layout.process.index
        rows = [
            (
                str(row.replica),
                f"{row.process}{' (this one)' if row.process == own else ''}",
                name_devices(row.devices),
                " ".join(str(c) for c in row.chips),
            )
            for row in self.replicas[:_MOST_REPLICAS]
        ]
        columns = ("replica", "process", "logical devices", "x, y, z, core")
        if self.chips is None:
            columns, rows = columns[:3], [row[:3] for row in rows]
        colours = tuple(self._colours[row.replica] for row in self.replicas[:_MOST_REPLICAS])
        return Table("Replicas", columns, tuple(rows), coloured=columns[0], colours=colours)

    @property
    def _colours(self) -> tuple[int, ...]:
        return choose_colours(len(self.replicas), self.chips)

    def _compiled(self) -> Table:
        # Equal rows are functions made by the same code.
        counted = collections.Counter(self.compilations)
        shown = list(counted.items())[-_MOST_COMPILATIONS:]
        return Table(
            "Compiled so far",
            ("step", "defined at", "programs", "why"),
            tuple(
                (c.function, shorten_source(c.source), str(n), c.why or "the first call")
                for c, n in shown
            ),
            frozenset({"programs"}),
        )


def choose_colours(num_replicas: int, chips: Chips | None) -> tuple[int, ...]:
    """Return the index in the palette of each replica; neighbours on chips differ."""
    if chips is not None and chips.grid.num_replicas == num_replicas:
        return chips.grid.colours
    return _reports.choose_colours(num_replicas)
