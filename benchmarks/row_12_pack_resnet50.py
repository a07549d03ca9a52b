"""Only what is small is packed: the gradients of ResNet-50.

Claim: `all_reduce` of ResNet-50's 161 leaves (97.5 MiB) on 2 and on 8 CPU devices takes at most
0.90 of the time of leaf by leaf, and at most 0.35 of one flat vector of all. Four leaves of 16 MiB
never take more than 1.05 of leaf by leaf: large ones are left alone, which is counted too. The arms
share a process.
"""

import math
from collections.abc import Iterator

from benchmarks import _sums
from benchmarks._bench import Bench, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._links import fitted
from benchmarks._resnet import resnet50_shapes

ROW = "12"
_MIB = 1 << 20


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    links = fitted(bench)
    yield links.note(ROW)
    shapes = resnet50_shapes()
    mib = sum(4 * math.prod(s) for s in shapes) / _MIB
    told = f"{len(shapes)} leaves, {mib:.1f} MiB"
    yield CountLine(ROW, "ResNet-50", "shapes", "", told, "161 leaves, 97.5 MiB")
    large = [(16 * _MIB // 4,)] * 4
    if bench.options.is_smoke:
        shapes, large = [s for s in shapes if math.prod(s) < 2000][:20], [(4 * _MIB // 16,)] * 2
    for n in bench.options.sizes(2, 8):
        arms = {
            "all_reduce": arm(_sums.api, n=n, shapes=shapes, links=links.path),
            "psum of the list": arm(_sums.per_leaf, n=n, shapes=shapes),
            "psum of one vector": arm(_sums.flat, n=n, shapes=shapes),
        }
        size = f"ResNet-50, N={n}"
        race = bench.race(size, arms, 2, in_one_process=True, times_rounds=4)
        yield race.line("all_reduce", "psum of the list", Need(0.90))
        yield race.line("all_reduce", "psum of one vector", Need(0.35))
        for label in list(arms)[1:]:
            yield race.same("sum", "all_reduce", label)
        bench.close("one")
        arms = {
            "all_reduce": arm(_sums.api, n=n, shapes=large, links=links.path),
            "psum of the list": arm(_sums.per_leaf, n=n, shapes=large),
        }
        size = f"4 x 16 MiB, N={n}"
        ours, theirs = bench.process("0").call(
            _sums.collectives, n=n, shapes=large, links=links.path
        )
        yield CountLine(ROW, size, "all_reduce", "psum of the list", ours, theirs)
        race = bench.race(size, arms, 2, in_one_process=True, times_rounds=20)
        yield race.line("all_reduce", "psum of the list", Need(1.05))
        yield race.same("sum", "all_reduce", "psum of the list")
        bench.close("one")
