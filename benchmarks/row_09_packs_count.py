"""`bytes_per_pack` gives exactly the planned packs in the compiled program.

Claim: the optimized HLO of a step with `all_reduce(..., options=CommunicationOptions(P))` holds one
all-reduce for each planned pack, of just its leaves, and no other collective: on 8 CPU devices, and
in programs compiled for a v5e 4x4 slice and for v5p 2x2x2. Plans close a pack once it has exceeded
P bytes, the last leaf first, and never mix dtypes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import jaxdist
from benchmarks._bench import Bench
from benchmarks._descriptions import V5E, V5P, has_tpu_compiler, layout_of
from benchmarks._lines import CountLine, Line, SkipLine
from benchmarks._resnet import resnet50_shapes
from jaxdist._collectives import plan_packs
from jaxdist.experimental import CommunicationOptions

ROW = "9"
Leaf = tuple[Sequence[int], str]
_KIB, _MIB = 1 << 10, 1 << 20
_ALL = 1 << 40


def leaf_set(name: str) -> list[Leaf]:
    """Shapes and dtypes of leaves."""
    if name == "ResNet-50":
        return [(s, "float32") for s in resnet50_shapes()]
    if name == "12 x 4 MiB":
        return [((_MIB,), "float32")] * 12
    # Two dtypes in turn, of very different sizes.
    return [((64 * (i % 7 + 1) ** 3,), ("float32", "int32")[i % 3 == 0]) for i in range(60)]


def packs(layout: str, leaves: str, bytes_per_pack: int) -> tuple[str, str]:
    """The all-reduces of the compiled program, and those of the plan."""
    mesh = layout_of(layout)
    strategy = jaxdist.MirroredStrategy(mesh=mesh.mesh, replica_axes=mesh.replica_axes)
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    shapes = leaf_set(leaves)

    def step(values: list[Any]) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", values, options=options)

    count = mesh.num_replicas
    given = [
        jax.ShapeDtypeStruct((count * s[0], *s[1:]), dtype, sharding=mesh.per_replica)
        for s, dtype in shapes
    ]
    compiled = strategy.lower(step, (given,)).compile()
    found = Counter((c.kind, c.operands, c.bytes_per_device) for c in compiled.collectives)
    sizes = [(4 * math.prod(s), dtype) for s, dtype in shapes]
    planned = Counter(
        ("all-reduce", len(pack), sum(sizes[i][0] for i in pack))
        for pack in plan_packs(sizes, bytes_per_pack)
    )
    words = _in_words(found)
    if found != planned:
        words += f"; not planned: {_in_words(found - planned)}"
    return words, _in_words(planned)


def _in_words(packs: "Counter[tuple[str, int, int]]") -> str:
    kinds = ", ".join(sorted({kind for kind, _, _ in packs}))
    leaves = sum(n * number for (_, n, _), number in packs.items())
    total = sum(size * number for (_, _, size), number in packs.items())
    return f"{packs.total()} {kinds} of {leaves} leaves, {total:,} bytes"


def run(bench: Bench) -> Iterator[Line]:
    """Count."""
    smoke = bench.options.is_smoke
    work = [
        ("cpu 8", "two dtypes", 4 * _KIB),
        ("cpu 8", "two dtypes", _ALL),
        *(("cpu 8", "12 x 4 MiB", p * _MIB) for p in (12, 24)),
        *(("cpu 8", "ResNet-50", p) for p in (1, 64 * _KIB, 4 * _MIB, 25 * _MIB, _ALL)),
    ]
    if has_tpu_compiler():
        for described in (V5E, V5P):
            name = described.name
            work += [(name, "two dtypes", 4 * _KIB)]
            work += [(name, "12 x 4 MiB", p * _MIB) for p in (1, 12, 24, 96)]
            work += [(name, "ResNet-50", p * _MIB) for p in (4, 25)]
    else:
        yield SkipLine(ROW, "programs for TPUs: libtpu is not installed")
    if smoke:
        # The second is the one that the TPU compiler would divide again.
        work = [w for w in work if w[1] == "two dtypes" or w[::2] == ("v5e 4x4", 24 * _MIB)]
    for layout, leaves, size in work:
        bench.options.report(f"row {ROW}: {layout}, {leaves}, {size:,} bytes per pack")
        found, planned = bench.process("0" if layout.startswith("cpu") else layout).call(
            packs, layout=layout, leaves=leaves, bytes_per_pack=size
        )
        told = "all bytes" if size == _ALL else f"{size:,} bytes"
        yield CountLine(ROW, f"{layout}, {leaves}", f"{told} per pack", "plan", found, planned)
