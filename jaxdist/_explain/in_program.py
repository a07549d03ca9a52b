"""Finds possible improvements of a compiled step, with the remedy in numbers."""

import collections
import re
from collections.abc import Iterator, Sequence

from jaxdist import hlo
from jaxdist._explain.findings import LARGE, Finding
from jaxdist._explain.shards import Leaf
from jaxdist._program import CompiledProgram, Explanation, Program, find_carried_arguments
from jaxdist._reports import plural, size
from jaxdist._values import Kind

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
