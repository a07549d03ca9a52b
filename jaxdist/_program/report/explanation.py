"""A report of what a compiled program communicates, to inspect and to print."""

import collections
import dataclasses

from jaxdist import cost, hlo
from jaxdist._collectives import TraceNotes
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.compiler_options import CompilerOptions, format_options
from jaxdist._program.logical.placed_work import PlacedWork
from jaxdist._program.proof.replication import TracedCollective
from jaxdist._program.report.matching import (
    AskedFor,
    CompiledRow,
    compiled_rows,
    match_collectives,
)
from jaxdist._reports import DividedWork, Report, Table, shorten_source


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """The collectives that a step asked for, those that XLA compiled, and their predicted times.

    Args:
        name: The name of the step.
        where: The layout, as text.
        compiled: The collectives of the compiled program, from its HLO. Equal ones are one row with
            a `count`.
        asked: The collectives of the step, from its trace, with what became of each.
        ignored: The hints that have no effect, with the reasons.
        links: The links between the devices, from which times are predicted.
        placed: The operations that run on one logical device of each replica.
        unknown: The operations of the compiled program that jaxdist does not know. They may
            communicate, and are not counted.
        work: The calls that divide their work over an axis (pipelines, attention, experts): for
            each its name, its line, and what it does.

    Example:
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", x)
        >>> report = MirroredStrategy().lower(step, (PerReplica(range(8)),)).explain()
        >>> [row.count for row in report.compiled], report.bytes_sent("inside")
        ([1], 7.0)
    """

    name: str
    where: str
    compiled: tuple[CompiledRow, ...]
    asked: tuple[AskedFor, ...]
    ignored: tuple[str, ...]
    links: cost.Links
    placed: tuple[PlacedWork, ...] = ()
    unknown: tuple[str, ...] = ()
    work: tuple[DividedWork, ...] = ()

    @property
    def num_collectives(self) -> int | None:
        """The number of collectives that one step runs; None if a loop has no fixed length."""
        counts = [None if row.times is None else row.count * row.times for row in self.compiled]
        return None if None in counts else sum(n for n in counts if n is not None)

    def bytes_sent(self, level: str) -> float:
        """Return the least bytes that a device sends in a step, `"inside"` or `"between"` workers.

        A GPU sends what an operation between NVLink domains moves inside a domain over NVLink. A
        loop without a fixed length counts as one iteration.
        """
        is_inside = level == "inside"
        rows = (row for row in self.compiled if is_inside or row.level == level)
        return sum(
            (row.sent_inside if is_inside else row.sent_between) * row.count * (row.times or 1)
            for row in rows
        )

    @property
    def predicted_seconds(self) -> float:
        """The time of all collectives in sequence. A loop of unknown length runs once."""
        return sum(row.seconds * row.count * (row.times or 1) for row in self.compiled)

    def parts(self) -> list[Table | str]:
        """Return tables and sentences."""
        parts: list[Table | str] = [f"Collectives of {self.name} for {self.where}"]
        if not self.compiled:
            parts.append("The compiled program has none.")
        else:
            parts += [_compiled_table(self.compiled), self._totals()]
        if self.unknown:
            title = "Not counted: this version of jaxdist does not know it; it may communicate"
            parts += [title, *(f"  {name}" for name in self.unknown)]
        if self.asked:
            parts.append(_asked_table(self.asked))
        parts += _choices(self.asked)
        for divided in self.work:
            parts += divided.lines()
        if self.placed:
            parts.append(_placed_table(self.placed))
        if self.ignored:
            parts += ["Hints without effect", *(f"  {sentence}" for sentence in self.ignored)]
        return parts

    def _totals(self) -> str:
        count = self.num_collectives
        runs = "as many runs as its loops decide" if count is None else _pluralize(count, "run")
        sent = f"{_bytes(self.bytes_sent('inside'))} inside a worker"
        if self.links.outer is not None:
            sent += f" and {_bytes(self.bytes_sent('between'))} between workers"
        turns = " (unknown loops counted as one turn)" if count is None else ""
        return (
            f"In a step: {runs}, a device sends {sent}, "
            f"predicted {_seconds(self.predicted_seconds)}{turns}"
        )


def explain_program(
    name: str,
    layout: ReplicaMesh,
    asked: tuple[TracedCollective, ...],
    told: TraceNotes,
    text: str,
    placed: tuple[PlacedWork, ...] = (),
    compiler_options: CompilerOptions = (),
) -> Explanation:
    """Read a compiled program, and match it with the collectives that the step requested."""
    links = cost.links_of(layout)
    found = hlo.collectives(text)
    asked = tuple(_add_plan(a, told) for a in asked)
    asked_for, origins = match_collectives(asked, found)
    where = describe_layout(layout)
    if compiler_options:
        where += f", compiled with {format_options(compiler_options)}"
    # One hint may be ignored at several places; `dict.fromkeys` below keeps one sentence.
    by_plan = (sentence for a in asked for sentence in a.plan.ignored)
    return Explanation(
        name,
        where,
        compiled_rows(found, origins, layout, links, hlo.num_participants(text)),
        asked_for,
        tuple(dict.fromkeys((*told.ignored.values(), *by_plan))),
        links,
        placed,
        hlo.unknown(text),
        list_divided_work(told),
    )


def list_divided_work(told: TraceNotes) -> tuple[DividedWork, ...]:
    """Return what the calls of a trace that divide their work over an axis do."""
    return tuple(DividedWork(*call, facts) for call, facts in told.work.items())


def describe_layout(layout: ReplicaMesh) -> str:
    """Return the numbers of replicas and logical devices, and their platform."""
    devices = f"{layout.num_logical} logical device(s) on {layout.platform}"
    return f"{layout.num_replicas} replica(s) x {devices}"


def _add_plan(asked: TracedCollective, told: TraceNotes) -> TracedCollective:
    """Return a collective with the all-reduce plan that left it unchanged."""
    plan = told.plans.get(asked.source)
    # An operation that the plan changed carries its algorithm itself.
    if plan is None or asked.algorithm or asked.kind != "psum":
        return asked
    # Computed only here, since most programs are never explained.
    return dataclasses.replace(asked, plan=plan())


def _compiled_table(rows: tuple[CompiledRow, ...]) -> Table:
    # The axis says something new only where the mesh has several.
    has_axes = len({axis for row in rows for axis in row.axes}) > 1
    names = ("kind", "count", "arrays", "bytes", "axis", "devices", "link", "runs", "predicted")
    return Table(
        "Compiled",
        (*(name for name in names if has_axes or name != "axis"), "from"),
        tuple(
            (
                row.kind,
                str(row.count),
                str(row.operands),
                f"{row.num_bytes:,}",
                *([" x ".join(row.axes)] if has_axes else []),
                f"{row.num_groups} x {row.group_size}"
                if row.num_groups > 1
                else str(row.group_size),
                f"{row.level} ({row.link})",
                _runs(row.times, row.in_branch),
                _seconds(row.seconds),
                _origin(row),
            )
            for row in rows
        ),
        frozenset({"count", "arrays", "bytes", "predicted"}),
    )


def _origin(row: CompiledRow) -> str:
    if row.added:
        return f"added by XLA for {shorten_source(row.source)}" if row.source else "added by XLA"
    more = f" and {len(row.sources) - 1} more" if len(row.sources) > 1 else ""
    return (shorten_source(row.source) or "no line noted") + more


def _asked_table(asked: tuple[AskedFor, ...]) -> Table:
    # A line in a loop of Python, or over leaves, asks for many equal collectives.
    counted = collections.Counter(asked)
    return Table(
        "Asked for",
        ("kind", "count", "arrays", "bytes", "runs", "by", "became", "at"),
        tuple(
            (
                a.kind,
                str(count),
                str(a.operands),
                f"{a.num_bytes:,}",
                _runs(a.times, False),
                a.algorithm or "as written",
                a.became,
                shorten_source(a.source),
            )
            for a, count in counted.items()
        ),
        frozenset({"count", "arrays", "bytes"}),
    )


def _placed_table(placed: tuple[PlacedWork, ...]) -> Table:
    """Return the table of work on one logical device. 0 operations: the mark had no effect."""
    columns = ("logical device", "operations", "results for others", "at")
    rows = tuple(
        (str(w.device), str(w.operations), str(w.results), shorten_source(w.source)) for w in placed
    )
    return Table("Placed", columns, rows, frozenset(columns[:3]))


def _choices(asked: tuple[AskedFor, ...]) -> list[Table | str]:
    """Return the lines that show each chosen algorithm, and the times of the alternatives."""
    chosen = {(a.source, a.algorithm, a.reason, a.alternatives): a for a in asked if a.algorithm}
    lines: list[Table | str] = ["Algorithms"] if chosen else []
    for a in chosen.values():
        times = dict(a.alternatives)
        own = f", {_seconds(times[a.algorithm])}" if a.algorithm in times else ""
        reason = f": {a.reason}" if a.reason else ""
        lines.append(f"  {shorten_source(a.source)}: {a.algorithm}{own}{reason}")
        others = [f"{n} {_seconds(t)}" for n, t in a.alternatives if n != a.algorithm]
        if others:
            lines.append(f"    not {', '.join(others)}")
    return lines


def _runs(times: int | None, in_branch: bool) -> str:
    runs = "while loop" if times is None else str(times)
    return f"{runs}, if taken" if in_branch else runs


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _bytes(value: float) -> str:
    return _pluralize(round(value), "byte")


def _pluralize(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
