"""What was asked for against what was compiled."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.proof.replication import TracedCollective
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
class Choice:
    """Which algorithm an all-reduce takes, and what else there was."""

    source: str
    algorithm: str
    reason: str
    alternatives: tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class AskedFor:
    """A collective of the step's trace, and what became of it.

    `outcome` is `compiled`, `merged` (XLA put it together with others), `gone` (the compiled
    program does without it) or `unknown` (XLA noted no line by which it could be found).
    """

    kind: str
    operands: int
    num_bytes: int
    times: int | None
    source: str
    outcome: str
    became: str  # in words
    algorithm: str = ""
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()

    @property
    def choice(self) -> Choice:
        """The algorithm without the operation."""
        return Choice(self.source, self.algorithm, self.reason, self.alternatives)


@dataclasses.dataclass(frozen=True)
class CompiledRow:
    """Compiled collectives that are alike.

    `num_bytes` is the size on one device of the whole: of what an all-gather gives and a
    reduce-scatter takes. `level` is `inside` a worker or `between` workers. `seconds` is the
    predicted time of one run of one of them.
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
    added: bool  # nothing that was asked for became it
    count: int = 1


def reconciled(
    asked: Sequence[TracedCollective], found: Sequence[CompiledCollective]
) -> tuple[tuple[AskedFor, ...], list[list[TracedCollective]]]:
    """What became of all that was asked for; for each compiled one, what it was made of."""
    origins: list[list[TracedCollective]] = [[] for _ in found]
    by_line: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    for i, c in enumerate(found):
        for source in c.sources:
            by_line[source].append(i)
    became: list[list[int]] = [[] for _ in asked]
    lines: collections.defaultdict[tuple[str, str], list[int]] = collections.defaultdict(list)
    for j, a in enumerate(asked):
        lines[a.source, _KINDS.get(a.kind, "")].append(j)
    for (source, kind), numbers in lines.items():
        # XLA may do with a line what another operation of it asked for: the line goes first.
        of_line = by_line[source]
        fitting = [i for i in of_line if found[i].kind == kind] or of_line
        _share(asked, numbers, found, fitting, became)
    for a, places in zip(asked, became, strict=True):
        for i in places:
            origins[i].append(a)
    # Operations of jaxdist's own, and those whose line XLA lost: by kind and size.
    for a, places in zip(asked, became, strict=True):
        if not places:
            spare = _spare(a, found, origins)
            if spare is not None:
                places.append(spare)
                origins[spare].append(a)
    noted = not found or any(c.sources for c in found)
    rows = [
        _asked_for(a, [(found[i], origins[i]) for i in p], noted)
        for a, p in zip(asked, became, strict=True)
    ]
    return tuple(rows), origins


def _share(
    asked: Sequence[TracedCollective],
    numbers: Sequence[int],
    found: Sequence[CompiledCollective],
    places: Sequence[int],
    became: list[list[int]],
) -> None:
    """Give the operations that a line asked for the compiled ones of that line, in order.

    Array by array: one of many arrays may be cut into several, and several may be put together.
    Those for which none is left are gone.
    """
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
    used = {i for j in numbers for i in became[j]}
    became[numbers[-1]] += [i for i in places if i not in used]


def _spare(
    a: TracedCollective,
    found: Sequence[CompiledCollective],
    origins: Sequence[list[TracedCollective]],
) -> int | None:
    """A compiled operation for one that no line leads to: its like, or one with room for it."""
    room = []
    for i, c in enumerate(found):
        if c.kind != _KINDS.get(a.kind):
            continue
        if not origins[i] and a.bytes_per_device in (c.operand_bytes, c.bytes_per_device):
            return i
        if origins[i] and c.operands >= a.operands + sum(b.operands for b in origins[i]):
            room.append(i)
    return room[0] if room else None


def _asked_for(
    a: TracedCollective,
    places: list[tuple[CompiledCollective, list[TracedCollective]]],
    lines_noted: bool,
) -> AskedFor:
    outcome, words = _outcome(a, places, lines_noted)
    return AskedFor(
        a.kind,
        a.operands,
        a.bytes_per_device,
        a.times,
        a.source,
        outcome,
        words,
        a.algorithm,
        a.reason,
        a.alternatives,
    )


def _outcome(
    a: TracedCollective,
    places: list[tuple[CompiledCollective, list[TracedCollective]]],
    lines_noted: bool,
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
    """What the program does, equal operations together."""
    devices = list(layout.mesh.devices.ravel())
    workers = [cost.worker_of(d) for d in devices]
    rows: collections.Counter[CompiledRow] = collections.Counter()
    for c, of in zip(found, origins, strict=True):
        # A program for several slices is written for the devices of one.
        crosses = c.between_slices or (participants == len(devices) and _crosses(c, workers))
        size = max(c.bytes_per_device, c.operand_bytes)
        link = links.across if crosses else links.inner
        times = c.times
        if times is None and len({a.times for a in of}) == 1:
            times = of[0].times  # the trace knows loops that the compiled text does not count
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
                seconds=_seconds(c, size, crosses, workers, links),
                source=sources[0] if sources else "",
                sources=sources,
                added=not of and (bool(c.sources) or not _no_lines(found)),
            )
        ] += 1
    return tuple(dataclasses.replace(row, count=count) for row, count in rows.items())


def _crosses(c: CompiledCollective, workers: list[int]) -> bool:
    """Whether some group, or some pair of a permutation, lies on two workers."""
    together = c.pairs or c.groups
    return any(len({workers[d] for d in group}) > 1 for group in together)


def _no_lines(found: Sequence[CompiledCollective]) -> bool:
    return not any(c.sources for c in found)


def _seconds(
    c: CompiledCollective, size: int, crosses: bool, workers: list[int], links: cost.Links
) -> float:
    link = links.across if crosses else links.inner
    whole = len(c.groups) == 1 and c.group_size == len(workers)
    count = len(set(workers))
    if c.kind == "all-reduce" and crosses and whole and len(workers) % count == 0:
        return cost.seconds("xla", c.group_size, size, links, len(workers) // count, c.operands)
    num_groups = 1 if c.kind == "collective-permute" else len(c.groups)
    n = max(c.group_size, 2) if c.kind == "collective-permute" else c.group_size
    # An all-to-all is one exchange, whose operands are its parts.
    operands = 1 if c.kind == "all-to-all" else c.operands
    return cost.collective_seconds(c.kind, n, size, link, operands, num_groups)
