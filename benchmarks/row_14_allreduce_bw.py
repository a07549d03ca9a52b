"""A large all-reduce is bound by memory, and between processes by the loopback.

Claim: `all_reduce` of one array of 16 or 64 MiB on 2, 4 and 8 CPU devices takes at most 1.7 times
`x + 1` on the same arrays, which reads and writes as much and sends nothing; and between 2
processes at most 0.9 of the time of TensorFlow's `MultiWorkerMirroredStrategy` with its ring.
"""

from collections.abc import Iterator

from benchmarks import _sums, _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._links import fitted, fitted_between

ROW = "14"
PROCESSES = 2
_MIB = 1 << 20


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    links = fitted(bench)
    yield links.note(ROW)
    sizes = (1,) if bench.options.is_smoke else (16, 64)
    for mib in sizes:
        shapes = [(mib * _MIB // 4,)]
        for n in bench.options.sizes(2, 8, full=(2, 4, 8)):
            arms = {
                "all_reduce": arm(_sums.api, n=n, shapes=shapes, links=links.path),
                "x + 1": arm(_sums.floor, n=n, shapes=shapes),
            }
            size = f"{mib} MiB, N={n}"
            steps = bench.options.steps(10 if mib < 64 else 3)
            race = bench.race(size, arms, steps, in_one_process=True, times_rounds=2)
            yield race.line("all_reduce", "x + 1", Need(1.7))
            told, right = race.facts["all_reduce"]["sum"], _sums.expected_sum(n, shapes)
            yield CountLine(ROW, size, "all_reduce", "arithmetic", f"sum {told}", f"sum {right}")
            bench.close("one")
    bench.close()
    skipped = bench.without_tensorflow("large arrays between processes against TensorFlow's")
    if skipped:
        yield skipped
        return
    between = fitted_between(bench, PROCESSES, 1)
    yield between.note(ROW)
    for mib in sizes:
        shapes = [(mib * _MIB // 4,)]
        arms = {
            "all_reduce": arm(
                _sums.api_joined, processes=PROCESSES, shapes=shapes, links=between.path
            ),
            "tf ring": tensorflow_arm(
                _tensorflow.workers_all_reduce, processes=PROCESSES, shapes=shapes, ring=True
            ),
        }
        size = f"{mib} MiB, 2 processes"
        race = bench.race(size, arms, bench.options.steps(8 if mib < 64 else 3), devices=1)
        yield race.line("all_reduce", "tf ring", Need(0.9))
        yield race.same("sum", "all_reduce", "tf ring")
