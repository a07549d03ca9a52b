"""Planning a step for a slice of TPUs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxdist import _replica
from jaxdist._planning import memory_advice
from jaxdist._planning.background import started
from jaxdist._planning.needs import Needs, compiled_or_refused, needs_of, read_needs
from jaxdist._planning.slice_axes import Axes
from jaxdist._planning.slices import Place, alone, place
from jaxdist._program import Program
from jaxdist._strategies import Strategy
from jaxdist._validate import as_flag, as_integer
from jaxdist.cost import Chip
from jaxdist.errors import ArgumentError
from jaxdist.explain import SlicePlan, seconds

# Lowers a step for a strategy, with so many rows of a batch for each replica.
Lower = Callable[[Strategy, "int | None"], Program]
# Told what is being done.
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A step that can be lowered for any strategy.

    Args:
        lower: Lowers it.
        rows: Rows of a batch that a replica gets; None where nothing is per-replica.
        rules: How its state is laid out, as a word.
        like: The strategy whose axes it has, and whose options of communication.
        axes: Its axes, where they are not those of `like`.
    """

    lower: Lower
    rows: int | None
    rules: str = ""
    like: Strategy | None = None
    axes: Axes | None = None


def plan(
    source: Source,
    topology: Any,
    logical: Any,
    *,
    global_batch: int | None = None,
    quick: bool = False,
    report: Report = lambda what: None,
) -> SlicePlan:
    """Compile a step for a slice, and for one device to compare with; see `Program.compile_for`."""
    as_flag("compile_for", "quick", quick)
    # The strategy of a scope around the call is not the one that is planned for.
    with _replica.enter_frame(None):
        report(f"describing {topology}")
        where = place(topology, logical, source.like, source.axes)
        rows = _rows(source, where, global_batch)
        return _planned(source, where, rows, quick, report)


def _planned(
    source: Source, where: Place, rows: int | None, quick: bool, report: Report
) -> SlicePlan:
    report(f"tracing for {where.name}")
    program = source.lower(where.strategy, rows)
    alone = None if quick else _traced_alone(source, where, rows)
    more = "" if quick else ", and for one device to compare with"
    report(f"compiling for {where.name}{more}; minutes where arrays are large")
    # The compiler of XLA leaves Python free, and works on one core: both steps at the same time.
    compiling = started(compiled_or_refused, program)
    single = None if alone is None else started(needs_of, *alone)
    needs = read_needs(program, where.device, compiling.result())
    one = None
    if single is not None and needs.memory.fits:
        report("compiling for one device, to compare with")
        one = single.result()
    made = SlicePlan(
        name=program.name,
        topology=where.name,
        chip=where.chip,
        devices_per_chip=where.devices_per_chip,
        num_slices=where.num_slices,
        assignment=where.assignment,
        rules=source.rules,
        rows_per_replica=rows,
        memory=needs.memory,
        flops=needs.flops,
        hbm_traffic=needs.hbm_traffic,
        traffic=needs.traffic,
        times=needs.times,
        notes=_notes(where, needs),
    )
    if not made.memory.fits:
        tried = None if quick else functools.partial(_needs, source, where)
        found = memory_advice.advice(made, needs, tried, report)
        return dataclasses.replace(made, advice=found)
    return made if one is None else _with_efficiency(made, one)


def _traced_alone(source: Source, where: Place, rows: int | None) -> tuple[Program, Chip]:
    """The step for one device of the same generation, and what that device has."""
    single = alone(where, source.like, source.axes)
    return source.lower(single.strategy, rows), single.device


def _with_efficiency(made: SlicePlan, one: Needs) -> SlicePlan:
    """The plan with what its devices do beside what one device alone would."""
    if one.times is None or made.times is None:
        note = "the step does not fit on one device"
        return dataclasses.replace(made, efficiency_note=note)
    # The same rows: on one device, and on all the logical devices of a replica.
    efficiency = one.times.predicted / (made.times.predicted * made.num_logical)
    note = f"of one device with the same rows, predicted {seconds(one.times.predicted)}"
    return dataclasses.replace(made, efficiency=efficiency, efficiency_note=note)


def _needs(source: Source, where: Place, rows: int) -> Needs:
    return started(needs_of, source.lower(where.strategy, rows), where.device).result()


def _rows(source: Source, where: Place, global_batch: int | None) -> int | None:
    if global_batch is None:
        return source.rows
    count = where.strategy.num_replicas_in_sync
    most = (1 << 31) - 1
    global_batch = as_integer(
        "compile_for", "global_batch", global_batch, least=1, most=most, example=count
    )
    if source.rows is None:
        raise ArgumentError(
            f"compile_for was given global_batch={global_batch}, and the step has no per-replica "
            "input.\n\nThe rows of a batch are shared by the replicas, and no argument has rows "
            "of replicas.\n\nLeave global_batch out."
        )
    if global_batch < count or global_batch % count:
        below, above = global_batch - global_batch % count, global_batch + -global_batch % count
        near = sorted({max(count, below), max(count, above)})
        raise ArgumentError(
            f"compile_for was given global_batch={global_batch}, and {where.name} has {count} "
            "replicas.\n\nEach replica takes the same number of rows, one or more.\n\n"
            f"Use {' or '.join(map(str, near))}."
        )
    return global_batch // count


def _notes(where: Place, needs: Needs) -> tuple[str, ...]:
    notes = []
    if where.chip.devices < where.devices_per_chip:
        notes.append(
            f"libtpu describes a chip of {where.chip.name} as {where.devices_per_chip} devices; on "
            "most TPU VMs JAX runs it as one."
        )
    if needs.unknown_loops:
        notes.append("Loops that decide while running were counted as one turn.")
    if needs.unknown:
        notes.append(
            "Operations of these are not counted, because their number is not known: "
            f"{', '.join(needs.unknown)}. Compute takes longer than this plan says."
        )
    return tuple(notes)
