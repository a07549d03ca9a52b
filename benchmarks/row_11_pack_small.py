"""Small leaves share an all-reduce where that is faster, without anybody asking for it.

Claim: `all_reduce` of 400 leaves of 1 KiB on 8 CPU devices takes at most 0.20 of the time of the
same all-reduce by hand, leaf by leaf. What is small is decided from the latency and bandwidth that
`jaxdist bench collectives` has fitted just before. Fewer replicas are reported.
"""

from collections.abc import Iterator

from benchmarks import _sums
from benchmarks._bench import Bench, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._links import fitted

ROW = "11"


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    links = fitted(bench)
    yield links.note(ROW)
    shapes = [(256,)] * (20 if bench.options.is_smoke else 400)
    for n in bench.options.sizes(8, full=(2, 4, 8)):
        arms = {
            "all_reduce": arm(_sums.api, n=n, shapes=shapes, links=links.path),
            "psum of the list": arm(_sums.per_leaf, n=n, shapes=shapes),
        }
        size = f"{len(shapes)} x 1 KiB, N={n}"
        race = bench.race(size, arms, bench.options.steps(20))
        yield race.line("all_reduce", "psum of the list", Need(0.20 if n == 8 else None))
        for label in arms:
            told, right = race.facts[label]["sum"], _sums.expected_sum(n, shapes)
            yield CountLine(ROW, size, label, "arithmetic", f"sum {told}", f"sum {right}")
