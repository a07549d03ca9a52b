"""Two-level all-reduces move the least bytes across workers.

Claim: on 2 workers of 4 devices and on 4 of 2, the algorithms `nccl/...` of `MultiWorkerAllReduce`
compile to one reduce-scatter within workers, the collectives of the outer algorithm across them,
and one all-gather within; `HierarchicalCopyAllReduce` (two halves) to 1 + 1 + 1. The groups are
the workers, and across them one device of each. What goes across is `S/k` of the S bytes
on each of the k devices of a worker.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import jaxdist
from benchmarks import _formulas
from benchmarks._bench import Bench
from benchmarks._lines import CountLine, Line
from benchmarks._steps import strategy
from jaxdist._collectives import HierarchicalCopyAllReduce

ROW = "10"
COUNT = 8
SIZE = 4096  # bytes on each replica
HIERARCHICAL = "HierarchicalCopyAllReduce"
_OUTER = ("xring", "rechd", "pscpu")


def two_levels(name: str, local: int) -> tuple[str, str]:
    """What the compiled program does, and what it should."""
    ops: Any = HierarchicalCopyAllReduce(num_packs=0)
    if name != HIERARCHICAL:
        workers = [f"/job:worker/task:{i}" for i in range(COUNT // local)]
        ops = jaxdist.contrib.MultiWorkerAllReduce(workers, local, (name, 1, -1))
    chosen = jaxdist.MirroredStrategy(strategy(COUNT).extended.worker_devices, ops)

    def step(x: jax.Array) -> jax.Array:
        total: jax.Array = jaxdist.get_replica_context().all_reduce("sum", x)
        return total

    given = jax.ShapeDtypeStruct(
        (COUNT * SIZE // 4,), np.float32, sharding=chosen.layout.per_replica
    )
    found = chosen.lower(step, (given,)).compile().collectives
    across = [c for c in found if _formulas.scope(c.pairs or c.groups, local) == _formulas.ACROSS]
    inside = [c for c in found if c not in across]
    counts = Counter((c.kind, _formulas.scope(c.pairs or c.groups, local)) for c in found)
    words = _in_words(
        counts,
        sorted({g for c in inside for g in c.groups}),
        _joined([g for c in across for g in c.groups]),
        sum(c.bytes_sent for c in across),
    )
    algorithm = "nccl/nccl" if name == HIERARCHICAL else name
    workers_ = COUNT // local
    part = SIZE // local
    steps_up = math.ceil(math.log2(workers_))
    sent = (
        2 * steps_up * part if algorithm == "nccl/pscpu" else 2 * (workers_ - 1) * part / workers_
    )
    return words, _in_words(
        _formulas.expected(algorithm, 1, COUNT, local, "cpu", COUNT),
        [tuple(range(i, i + local)) for i in range(0, COUNT, local)],
        [tuple(range(i, COUNT, local)) for i in range(local)],
        sent,
    )


def _joined(groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Devices that have anything to do with one another."""
    joined: list[set[int]] = []
    for group in groups:
        touching = [g for g in joined if g & set(group)]
        joined = [g for g in joined if g not in touching] + [set(group).union(*touching)]
    return sorted(tuple(sorted(g)) for g in joined)


def _in_words(
    counts: _formulas.Counted,
    inside: list[tuple[int, ...]],
    across: list[tuple[int, ...]],
    sent: float,
) -> str:
    def listed(groups: list[tuple[int, ...]]) -> str:
        return "".join("{" + ",".join(map(str, g)) + "}" for g in groups)

    return (
        f"{_formulas.in_words(counts)}; workers {listed(inside)}; across {listed(across)}; "
        f"{sent:g} of {SIZE} bytes sent across"
    )


def run(bench: Bench) -> Iterator[Line]:
    """Count."""
    work = [(f"nccl/{outer}", local) for local in (4, 2) for outer in _OUTER]
    for name, local in [*work, (HIERARCHICAL, 4)]:
        size = f"{COUNT // local} workers of {local}"
        bench.options.report(f"row {ROW}: {name}, {size}")
        found, formula = bench.process("0").call(two_levels, name=name, local=local)
        yield CountLine(ROW, size, name, "formula", found, formula)
