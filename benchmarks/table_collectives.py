"""The collectives of every all-reduce algorithm, counted in compiled programs.

Claim: each of the eight names of `MultiWorkerAllReduce`, in 1 and in 2 shards, compiles to exactly
the collectives of its formula (`_formulas.py`): on 2, 3, 4, 6 and 8 CPU devices, and in programs
that the TPU compiler makes for a v5e 4x4 slice (four workers of four) and for two such slices (two
workers of sixteen).

`within` and `across` say whether the groups of an operation stay within workers.
"""

from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import _formulas
from benchmarks._bench import Bench
from benchmarks._descriptions import DESCRIPTIONS, TWO_SLICES, V5E, has_tpu_compiler, layout_of
from benchmarks._lines import CountLine, Line, SkipLine
from benchmarks._sums import mapped
from jaxdist import hlo
from jaxdist._collectives import CommunicationOptions, MultiWorkerAllReduce
from jaxdist._collectives.algorithms.by_name import NAMES

ROW = "collectives"
SHARDS = (1, 2)
# (replicas, those of a worker): for one, some, and all.
CPU = ((2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (6, 2), (6, 3), (8, 2), (8, 4))
TPU = ((V5E, 4), (TWO_SLICES, 16))
# All parts of the vector are whole tiles (1,024 numbers): the TPU compiler gathers others, which
# would not lie one behind the other, by adding them up with zeros in between.
_SIZES = {"cpu": 960, "tpu": 1 << 19}


def counted(layout: str, local: int, name: str, shards: int) -> tuple[str, str]:
    """Collectives of the compiled program, and of the formula."""
    where = layout_of(layout)
    count, platform = where.num_replicas, where.platform
    workers = [f"/job:worker/task:{i}" for i in range(count // local)]
    ops = MultiWorkerAllReduce(workers, local, (name, shards, -1))
    vector = jax.ShapeDtypeStruct((_SIZES[platform],), np.float32)
    _, how = ops.summing([vector], where, CommunicationOptions())
    rows = jax.ShapeDtypeStruct((count * vector.size,), np.float32, sharding=where.per_replica)
    program = mapped(where, lambda x: how([x])[0], where.replica_spec)
    text = program.lower(rows).compile().as_text() or ""
    found: _formulas.Counted = Counter(
        (
            c.kind,
            _formulas.BETWEEN if c.between_slices else _formulas.scope(c.pairs or c.groups, local),
        )
        for c in hlo.collectives(text)
    )
    slice_size = count // DESCRIPTIONS[layout].slices if platform == "tpu" else count
    formula = _formulas.expected(name, shards, count, local, platform, slice_size)
    return _formulas.in_words(found), _formulas.in_words(formula)


def run(bench: Bench) -> Iterator[Line]:
    """Count."""
    if not has_tpu_compiler():
        yield SkipLine(ROW, "TPU descriptions: libtpu is not installed")
    for layout, local, name in _work(bench.options.is_smoke):
        # What two shards compile to has what one does in it.
        is_long = bench.options.is_smoke and not layout.startswith("cpu")
        for shards in SHARDS[1:] if is_long else SHARDS:
            bench.options.report(f"{layout}, workers of {local}: {name} x {shards}")
            process = bench.process("cpu" if layout.startswith("cpu") else layout)
            found, formula = process.call(
                counted, layout=layout, local=local, name=name, shards=shards
            )
            size = f"{layout}, workers of {local}"
            yield CountLine(ROW, size, f"{name} x {shards}", "formula", found, formula)


def _work(is_smoke: bool) -> Iterator[tuple[str, int, str]]:
    """Layouts, the replicas of a worker, and names."""
    known: set[tuple[int, str]] = set()
    for count, local in ((6, 2),) if is_smoke else CPU:
        for name in NAMES:
            # Names without a slash know no workers.
            if "/" in name or (count, name) not in known:
                known.add((count, name))
                yield f"cpu {count}", local, name
    if has_tpu_compiler():
        # The TPU compiler takes seconds for a ring of 32.
        names = [n for n in NAMES if n != "xring"] if is_smoke else NAMES
        yield from ((d.name, local, name) for d, local in TPU for name in names)
