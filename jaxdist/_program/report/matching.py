"""Matches the collectives that a step requested with the compiled ones."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.proof.replication import TracedCollective
from jaxdist._program.report.group_cost import (
    Spread,
    count_bytes_between,
    find_spread,
    predict_seconds,
)
from jaxdist.hlo import CompiledCollective

_KINDS = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


@dataclasses.dataclass(frozen=True)
class AskedFor:
    """A collective in the trace of a step, and what became of it.

    `outcome` is `compiled`, `merged` (XLA combined it with others), `gone` (the compiled program
    does not need it) or `unknown` (XLA recorded no source lines to find it by).
    """

    kind: str
    operands: int
    num_bytes: int
    times: int | None
    source: str
    outcome: str
    became: str  # as text
    algorithm: str = ""
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class CompiledRow:
    """Equal collectives of a compiled program.

    `num_bytes` is the whole size on one device: the result of an all-gather, and the operand of a
    reduce-scatter. `level` is `inside` a worker or `between` workers. `bytes_sent` are the least
    bytes that one device sends, and `sent_between` those of them that it sends over the network
    between workers. `seconds` is the predicted time of one run of one of them.
    """

    kind: str
    operands: int
    num_bytes: int
    bytes_sent: float
    group_size: int
    num_groups: int
    level: str
    link: str
    times: int | None
    in_loop: bool
    in_branch: bool
    seconds: float
    source: str
    sources: tuple[str, ...]
    added: bool  # no collective of the step became it
    count: int = 1
    sent_between: float = 0.0
    # The axes of the mesh along which the devices of a group differ.
    axes: tuple[str, ...] = ()
    # The kind that the step requested, if the compiler made an all-reduce of it: `all-gather` or
    # `reduce-scatter`, for which a device sends half of the bytes.
    enlarged: str = ""

    @property
    def sent_inside(self) -> float:
        """The bytes that one device sends to devices of its own worker."""
        return self.bytes_sent - self.sent_between


def match_collectives(
    asked: Sequence[TracedCollective], found: Sequence[CompiledCollective]
) -> tuple[tuple[AskedFor, ...], list[list[TracedCollective]]]:
    """Return what became of each requested collective, and the origins of each compiled one."""
    origins: list[list[TracedCollective]] = [[] for _ in found]
    by_line: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    for i, c in enumerate(found):
        for source in c.sources:
            by_line[source].append(i)
    became: list[list[int]] = [[] for _ in asked]
    lines: collections.defaultdict[tuple[str, str], list[int]] = collections.defaultdict(list)
    # By line and kind: one line may ask for collectives of several kinds.
    for j, a in enumerate(asked):
        lines[a.source, _KINDS.get(a.kind, "")].append(j)
    for (source, kind), numbers in lines.items():
        # XLA may use another kind. So if no compiled collective of the line has the kind, all of
        # the line match, except those that XLA names after another kind.
        of_line = [i for i in by_line[source] if _get_named_kind(found[i]) in (kind, "")]
        fitting = [i for i in by_line[source] if found[i].kind == kind] or of_line
        _match_line(asked, numbers, found, fitting, became)
    for a, places in zip(asked, became, strict=True):
        for i in places:
            origins[i].append(a)
    # jaxdist's own operations, and those whose line XLA lost, are matched by kind and size.
    for find in (_find_unmatched, _find_scattered):
        for a, places in zip(asked, became, strict=True):
            spare = None if places else find(a, found, origins)
            if spare is not None:
                places.append(spare)
                origins[spare].append(a)
    noted = not found or any(c.sources for c in found)
    rows = []
    for a, p in zip(asked, became, strict=True):
        outcome, words = _outcome([(found[i], origins[i]) for i in p], noted)
        of_trace = (a.kind, a.operands, a.bytes_per_device, a.times, a.source)
        of_plan = (a.plan.algorithm, a.plan.reason, a.plan.alternatives)
        rows.append(AskedFor(*of_trace, outcome, words, *of_plan))
    return tuple(rows), origins


def _match_line(
    asked: Sequence[TracedCollective],
    numbers: Sequence[int],
    found: Sequence[CompiledCollective],
    places: Sequence[int],
    became: list[list[int]],
) -> None:
    """Assign the compiled collectives of a source line to the requested ones, in order.

    It counts arrays: XLA may cut one collective of many arrays into several, or combine several
    into one. A requested collective that gets none is gone.
    """
    # A stack in reverse, so that `pop` takes the compiled ones in program order.
    left = [(i, found[i].operands) for i in reversed(places)]
    for j in numbers:
        wanted = asked[j].operands
        while wanted and left:
            i, arrays = left.pop()
            became[j].append(i)
            # The operands of an all-to-all are the parts of one array.
            taken = arrays if found[i].kind == "all-to-all" else min(wanted, arrays)
            wanted = 0 if found[i].kind == "all-to-all" else wanted - taken
            if arrays > taken:
                left.append((i, arrays - taken))
    # Compiled ones that are left also belong to the line: the last requested one gets them.
    used = {i for j in numbers for i in became[j]}
    became[numbers[-1]] += [i for i in places if i not in used]


def _find_unmatched(
    a: TracedCollective,
    found: Sequence[CompiledCollective],
    origins: Sequence[list[TracedCollective]],
) -> int | None:
    """Return a compiled collective for one without a line: of equal size, or with room for it."""
    room = []
    for i, c in enumerate(found):
        if c.kind != _KINDS.get(a.kind):
            continue
        if not origins[i] and a.bytes_per_device in (c.operand_bytes, c.bytes_per_device):
            return i
        # XLA may have merged it with others: then the compiled one has more operands than those.
        if origins[i] and c.operands >= a.operands + sum(b.operands for b in origins[i]):
            room.append(i)
    return room[0] if room else None


def _find_scattered(
    a: TracedCollective,
    found: Sequence[CompiledCollective],
    origins: Sequence[list[TracedCollective]],
) -> int | None:
    """Return the all-reduce that the compiler made from a reduce-scatter, alone or with others."""
    if _KINDS.get(a.kind) != "reduce-scatter":
        return None
    room = []
    for i, c in enumerate(found):
        left = c.operands - sum(b.operands for b in origins[i])
        if _is_scattered(c) and left >= a.operands:
            if c.operands == a.operands and c.operand_bytes == a.bytes_per_device:
                return i
            if c.operands > a.operands:
                room.append(i)
    return room[0] if room else None


def _is_scattered(c: CompiledCollective) -> bool:
    """Whether this all-reduce was a reduce-scatter: the compiler drops its line and name."""
    return c.kind == "all-reduce" and not c.sources and not c.op_name


def _get_named_kind(c: CompiledCollective) -> str:
    """Return the kind after which XLA names a collective; "" if the name says none."""
    return _KINDS.get(c.op_name.rpartition("/")[2], "")


def _outcome(
    places: list[tuple[CompiledCollective, list[TracedCollective]]], lines_noted: bool
) -> tuple[str, str]:
    if not places:
        if not lines_noted:
            return "unknown", "unknown: XLA noted no lines"
        return "gone", "gone: unused, or computed already"
    others = max(len(origins) for _, origins in places) - 1
    if others:
        return "merged", f"merged with {others} other{'s' if others > 1 else ''}"
    kinds = dict(collections.Counter(c.kind for c, _ in places))
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return "compiled", words


def compiled_rows(
    found: Sequence[CompiledCollective],
    origins: Sequence[list[TracedCollective]],
    layout: ReplicaMesh,
    links: cost.Links,
    participants: int,
) -> tuple[CompiledRow, ...]:
    """Return the compiled collectives; equal ones are one row with a count."""
    devices = list(layout.mesh.devices.ravel())
    workers = [cost.worker_of(d) for d in devices]
    has_lines = any(c.sources for c in found)
    rows: collections.Counter[CompiledRow] = collections.Counter()
    for c, of in zip(found, origins, strict=True):
        # A program for several TPU slices is compiled for the devices of one of them.
        is_whole = participants == len(devices)
        spread = find_spread(c, workers) if is_whole else Spread(1, c.group_size)
        crosses = c.between_slices or spread.workers > 1
        size = max(c.bytes_per_device, c.operand_bytes)
        link = links.across if crosses else links.inner
        between = c.bytes_sent if crosses else 0.0
        if layout.platform == "gpu" and crosses:
            between = count_bytes_between(c, size, spread)
        times = c.times
        if times is None and len({a.times for a in of}) == 1:
            times = of[0].times  # The trace knows the lengths of loops that XLA's text lacks.
        sources = c.sources or tuple(dict.fromkeys(a.source for a in of))
        rows[
            CompiledRow(
                kind=c.kind,
                operands=c.operands,
                num_bytes=size,
                bytes_sent=c.bytes_sent,
                group_size=c.group_size,
                num_groups=len(c.groups),
                level="between" if crosses else "inside",
                link=link.name,
                times=times,
                in_loop=c.in_loop,
                in_branch=c.in_branch,
                seconds=predict_seconds(c, size, crosses, spread, workers, links),
                source=sources[0] if sources else "",
                sources=sources,
                added=not of and has_lines,
                sent_between=between,
                axes=_find_axes(c, layout) if is_whole else (),
                enlarged=_get_smaller_kind(c, of),
            )
        ] += 1
    return tuple(dataclasses.replace(row, count=count) for row, count in rows.items())


def _find_axes(c: CompiledCollective, layout: ReplicaMesh) -> tuple[str, ...]:
    """Return the axes of the mesh along which devices of one group differ."""
    names, shape = layout.mesh.axis_names, layout.mesh.devices.shape
    found: set[int] = set()
    for group in c.pairs or c.groups:
        places = np.stack(np.unravel_index(np.asarray(group), shape))
        found |= {*np.flatnonzero(places.max(1) != places.min(1)).tolist()}
    return tuple(name for number, name in enumerate(names) if number in found)


def _get_smaller_kind(c: CompiledCollective, origins: Sequence[TracedCollective]) -> str:
    """Return the kind that the step requested, if an all-reduce sends more instead."""
    if c.kind != "all-reduce":
        return ""
    named = _get_named_kind(c)
    if named in ("all-gather", "reduce-scatter"):
        return named
    asked = {_KINDS.get(a.kind) for a in origins}
    return "reduce-scatter" if _is_scattered(c) and asked == {"reduce-scatter"} else ""
