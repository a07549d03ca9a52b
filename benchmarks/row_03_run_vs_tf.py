"""An empty step is far cheaper than in TensorFlow.

Claim: `strategy.run(x + 1)` takes at most 0.05, 0.35, 0.40 and 0.50 of the time of
`tf.function(strategy.run)` at 1, 2, 4 and 8 replicas.
"""

from collections.abc import Iterator

from benchmarks import _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._lines import Line, Need
from benchmarks.row_01_run_overhead_1leaf import api

ROW = "3"
NEEDS = {1: 0.05, 2: 0.35, 4: 0.40, 8: 0.50}


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("run against tf.function(run)")
    if skipped:
        yield skipped
        return
    for n in bench.options.sizes(1, 2, 4, 8):
        steps = {"run": bench.options.steps(1000 if n == 1 else 300)}
        steps["tf.function(run)"] = bench.options.steps(200)
        arms = {
            "run": arm(api, n=n),
            "tf.function(run)": tensorflow_arm(_tensorflow.run_plus_one, n=n),
        }
        race = bench.race(f"N={n}", arms, steps)
        yield race.line("run", "tf.function(run)", Need(NEEDS[n]))
