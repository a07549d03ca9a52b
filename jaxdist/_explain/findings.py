"""Finds possible improvements of arrays, strategies and compiled steps, and their remedies."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxdist import hlo
from jaxdist._explain.leaves import Found
from jaxdist._explain.shards import Index, Leaf, Shard, list_shards
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import (
    Compilation,
    CompiledProgram,
    Explanation,
    Program,
    find_carried_arguments,
    make_in_slot,
    must_move,
)
from jaxdist._reports import plural, size
from jaxdist._values import Kind, PerReplica

# Below this, a copy costs less than the latency of starting it.
LARGE = 1 << 20
# This many programs of one function are usual: a smaller last batch, or an evaluation.
_USUAL_PROGRAMS = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that costs memory or time, and what to do.

    Args:
        kind: `replicated`, `host`, `resharding`, `compilation`, `kept state` or `gather in a loop`.
        what: The finding, with names and numbers.
        remedy: What to do, and the numbers afterwards.
        num_bytes: The bytes that the remedy saves: memory of a device, or bytes that are copied in
            each step. 0 if it does not save bytes.
    """

    kind: str
    what: str
    remedy: str
    num_bytes: int = 0

    def lines(self) -> Iterator[str]:
        """Yield the two sentences."""
        yield f"  {self.what}"
        yield f"    {self.remedy}"


def show_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the section of a report; nothing without findings."""
    if findings:
        yield "Worth a change"
        yield from (line for f in findings for line in f.lines())


def find_in_arrays(found: Sequence[Found], layout: ReplicaMesh | None) -> Iterator[Finding]:
    """Yield findings for arrays that steps of a strategy take."""
    yield from _find_replicated([leaf for leaf, _ in found])
    if layout is not None:
        for leaf, value in found:
            yield from _find_copied(leaf, value, layout)


def _find_replicated(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Yield large arrays that are whole on all devices, while others are cut or could be."""
    placed = [leaf for leaf in leaves if leaf.shards]
    cut = {leaf.role for leaf in placed if leaf.num_parts > 1}
    whole = [le for le in placed if le.num_parts == 1 and le.num_copies > 1]
    for leaf in whole:
        if leaf.role in cut and leaf.role != "batch" and leaf.device_bytes >= LARGE:
            piece = -(-leaf.device_bytes // leaf.num_copies)
            what = "arrays" if leaf.role == "other" else leaf.role
            yield Finding(
                "replicated",
                f"{leaf.name}, {leaf.array}, is whole on each of {leaf.num_copies} devices "
                f"({size(leaf.device_bytes)}), while other {what} are cut.",
                f"A rule of jaxdist.partition.Shard for it leaves {size(piece)} on each device.",
                leaf.device_bytes - piece,
            )
    state = [leaf for leaf in whole if leaf.role == "optimizer"]
    total = sum(leaf.device_bytes for leaf in state)
    if "optimizer" not in cut and total >= LARGE:
        copies = max(leaf.num_copies for leaf in state)
        piece = sum(-(-leaf.device_bytes // copies) for leaf in state)
        yield Finding(
            "replicated",
            f"The optimizer state is whole on each of {copies} devices: {size(total)} in "
            f"{plural(len(state), 'array')}.",
            f"jaxdist.sharded_update(tx) keeps about {size(piece)} of it on each device.",
            total - piece,
        )


def _find_copied(leaf: Leaf, value: Any, layout: ReplicaMesh) -> Iterator[Finding]:
    """Yield a finding for an array that each call of `run` copies."""
    devices = len(layout.devices)
    if leaf.placed == "on the host":
        if leaf.num_bytes < LARGE:
            return
        per_replica = isinstance(value, PerReplica) or leaf.role == "batch"
        copied = leaf.num_bytes * (1 if per_replica else devices)
        rows = leaf.shape[0] if leaf.shape else 0
        piece = leaf.num_bytes if per_replica else leaf.num_bytes // max(1, layout.num_replicas)
        each = (
            ""
            if per_replica or not rows or rows % layout.num_replicas
            else f": {rows // layout.num_replicas:,} rows, {size(piece)} for each replica"
        )
        yield Finding(
            "host",
            f"{leaf.name}, {leaf.array}, is in the memory of the host: each call of run copies "
            f"{size(copied)} to {plural(devices, 'device')}.",
            "If it is a batch, read it from strategy.experimental_distribute_dataset, which copies "
            f"ahead of the step{each}. If it stays the same, jax.device_put it once.",
            copied,
        )
        return
    if not isinstance(value, jax.Array) or not leaf.shards or leaf.num_bytes < LARGE:
        return
    slot = make_in_slot(value, layout)
    if not must_move(value, slot):
        return
    needed = list_shards(slot.sharding, leaf.stored, leaf.itemsize)
    has = {shard.device: shard.index for shard in leaf.shards}
    copied = sum(n.num_bytes - _overlap(n, has.get(n.device)) * leaf.itemsize for n in needed)
    yield Finding(
        "resharding",
        f"{leaf.name}, {leaf.array}, is {leaf.describe()}, and a step takes it "
        f"{slot.kind.value} on {plural(devices, 'device')}: each call of run copies "
        f"{size(copied)}.",
        f"Place it once, {size(needed[0].num_bytes)} on each device: "
        "jax.device_put(x, strategy.replicated_sharding), or strategy.per_replica_sharding if "
        "its rows are a batch.",
        copied,
    )


def _overlap(needed: Shard, index: Index | None) -> int:
    """Return how many elements of a part a device already has."""
    if index is None:
        return 0
    pairs = zip(needed.index, index, strict=True)
    return math.prod(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def find_in_compilations(
    compilations: Sequence[Compilation], shorten: Callable[[str], str]
) -> Iterator[Finding]:
    """Yield functions that are compiled again and again, with the reasons."""
    by_code: dict[tuple[str, str], list[Compilation]] = collections.defaultdict(list)
    for one in compilations:
        by_code[one.function, one.source].append(one)
    for (name, source), of in by_code.items():
        objects = sum(one.why is None for one in of)
        changed = [one.why for one in of if one.why is not None]
        if objects > _USUAL_PROGRAMS:
            yield Finding(
                "compilation",
                f"{name} at {shorten(source)} was compiled for {objects} function objects that the "
                "same code made.",
                f"Define it once, outside of the loop: 1 program for {objects}.",
            )
        if len(changed) >= _USUAL_PROGRAMS:
            yield Finding(
                "compilation",
                f"{name} at {shorten(source)} was compiled {len(of)} times; the last time for "
                f"{changed[-1]}.",
                _advise_on_signatures(changed),
            )


def _advise_on_signatures(changed: Sequence[str]) -> str:
    """Return the remedy for a function with several signatures."""
    static = sum("a Python value" in why for why in changed)
    if static > len(changed) // 2:
        return "Pass the value as an array (jnp.asarray(x)): then all values share 1 program."
    return (
        "Pad the batches to one shape: jaxdist.PartialBatch.PAD does it, and then "
        f"{len(changed) + 1} programs are 1."
    )


_POSITION = re.compile(r"args\[(\d+)\]")
# If XLA adds one of these, the layouts of two operations differ.
_RESHARDING = ("all-gather", "all-to-all", "collective-permute")


def find_in_program(
    program: Program, compiled: CompiledProgram, leaves: Sequence[Leaf], report: Explanation
) -> Iterator[Finding]:
    """Yield possible improvements.

    Args:
        program: The program.
        compiled: The same program, compiled.
        leaves: Its arguments.
        report: Its collectives.
    """
    count = program.layout.num_replicas
    source = find_carried_arguments(program.signature, program.traced, count)
    # Variables of NNX objects come first, both in the inputs and in the results.
    state = {*range(program.traced.num_graph), *source.values()}
    yield from _find_whole_batches(program, leaves, state)
    yield from _find_kept_state(program, leaves, state)
    yield from _find_repeated_gathers(compiled)
    yield from _find_added(report)


def _find_whole_batches(
    program: Program, leaves: Sequence[Leaf], state: set[int]
) -> Iterator[Finding]:
    """Yield large arguments that every replica gets whole, and that are not state."""
    count = program.layout.num_replicas
    rows_of: dict[str, set[int]] = collections.defaultdict(set)
    for leaf in leaves:
        rows_of[_get_argument(leaf)].add(leaf.shape[0] if leaf.shape else 0)
    for number, (leaf, slot) in enumerate(zip(leaves, program.signature.inputs, strict=True)):
        rows = leaf.shape[0] if leaf.shape else 0
        is_whole = slot.kind is Kind.MIRRORED and count > 1 and not slot.is_variable
        # The arrays of a batch have equal numbers of rows; those of parameters seldom do.
        is_batch = len(rows_of[_get_argument(leaf)]) == 1 and rows and rows % count == 0
        if number in state or not is_whole or not is_batch or leaf.device_bytes < LARGE:
            continue
        piece = leaf.device_bytes // count
        yield Finding(
            "replicated",
            f"{leaf.name}, {leaf.array}, is whole on each of {count} replicas "
            f"({size(leaf.device_bytes)}), and the step does not return it as state. If its rows "
            f"are a batch, each replica computes all {rows:,} of them.",
            "jaxdist.PerReplica.of_global(jax.device_put(x, strategy.per_replica_sharding)) gives "
            f"each replica {rows // count:,} rows, {size(piece)}.",
            leaf.device_bytes - piece,
        )


def _get_argument(leaf: Leaf) -> str:
    """Return the argument that contains an array, such as `args[0]`."""
    found = _POSITION.match(leaf.name)
    return found[0] if found else leaf.name


def _find_kept_state(
    program: Program, leaves: Sequence[Leaf], state: set[int]
) -> Iterator[Finding]:
    """Yield the state that exists twice because it is not donated."""
    kept = [leaves[n] for n in sorted(state) if n not in program.donated]
    total = sum(leaf.device_bytes for leaf in kept)
    if total < LARGE:
        return
    # Arguments that are already donated stay donated.
    names = [leaf.name for leaf in kept] + [leaves[n].name for n in program.donated]
    positions = tuple(sorted({int(m[1]) for name in names if (m := _POSITION.match(name))}))
    yield Finding(
        "kept state",
        f"{size(total)} of old state in {plural(len(kept), 'array')} stay in memory beside the new "
        "state, because they are not donated.",
        f"strategy.run(..., options=jaxdist.RunOptions(donate_argnums={positions})) reuses them.",
        total,
    )


def _find_repeated_gathers(compiled: CompiledProgram) -> Iterator[Finding]:
    """Yield all-gathers in a loop that gather the same array in each iteration."""
    # Layers of a model, and the lines of one layer, often have equal ones.
    counted = collections.Counter(hlo.repeated_gathers(compiled.as_text()))
    for gather, count in counted.items():
        times = "in each iteration" if gather.times is None else f"{gather.times} times"
        arrays = "an array" if count == 1 else f"{count} arrays"
        # If the length of the loop is unknown, count one repetition.
        saved = count * ((gather.times or 2) - 1) * gather.num_bytes
        least = " at least" if gather.times is None else ""
        yield Finding(
            "gather in a loop",
            f"A loop gathers {arrays} that it does not change {times}, {size(gather.num_bytes)} "
            f"each: {gather.source or 'XLA recorded no line'}.",
            "Gather before the loop with jaxdist.partition.gather: "
            f"{size(count * gather.num_bytes)} stay in memory, and{least} {size(saved)} less are "
            "gathered in a step.",
            saved,
        )


def _find_added(report: Explanation) -> Iterator[Finding]:
    """Yield large collectives that no line requested: XLA changes the layout inside the step."""
    for row in report.compiled:
        runs = row.count * (row.times or 1)
        sent = round(row.bytes_sent * runs)
        if row.added and row.kind in _RESHARDING and row.num_bytes * runs >= LARGE:
            yield Finding(
                "resharding",
                f"XLA added {plural(row.count, row.kind)} of {size(row.num_bytes)}, "
                f"{plural(runs, 'run')} in a step, to change a layout"
                + (f" for {row.source}." if row.source else "."),
                "jaxdist.partition.constrain on the value before that operation keeps one layout: "
                f"a device sends {size(sent)} less.",
                sent,
            )
