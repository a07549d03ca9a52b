"""A training step over processes takes as long as the one written by hand.

Claim: the data-parallel SGD step of the MLP over 2 processes takes at most 1.05 times a
hand-written `jit(shard_map)` with one `pmean`, with the doctor and the agreement of
the processes running as users have them; and at most 1.05 times that with `timeout_seconds` on top.
All arms come to the same loss.
"""

from collections.abc import Iterator

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._workers import api_workers, hand_workers
from benchmarks.row_06_step_parity import same_loss

ROW = "25"
PROCESSES = 2


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    name = "tiny" if bench.options.is_smoke else "mlp"
    arms = {
        "run": arm(api_workers, processes=PROCESSES, name=name),
        "run, timeout_seconds": arm(api_workers, processes=PROCESSES, name=name, seconds=60.0),
        "jit(shard_map)": arm(hand_workers, processes=PROCESSES, name=name),
        # The spread of two equal loops, against which the others have to be read.
        "jit(shard_map) again": arm(hand_workers, processes=PROCESSES, name=name),
    }
    race = bench.race(f"{name}, 2 processes", arms, bench.options.steps(20), devices=1)
    yield race.line("run", "jit(shard_map)", Need(1.05))
    yield race.line("run, timeout_seconds", "run", Need(1.05))
    yield race.line("jit(shard_map) again", "jit(shard_map)", Need())
    yield same_loss(race, "run", "jit(shard_map)")
    bench.close()
