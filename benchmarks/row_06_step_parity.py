"""A training step through the API takes as long as the one written by hand.

Claim: the data-parallel SGD step of the MLP (670k parameters) and of the transformer (9.65M)
takes at most 1.03 times a hand-written `jit(shard_map)` with one `pmean`, both with donated
parameters; and both arms come to the same loss.
"""

from collections.abc import Iterator

from benchmarks._bench import Bench, Race, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._steps import api_training, hand_training

ROW = "6"


def same_loss(race: Race, arm: str, comparator: str) -> CountLine:
    """Whether two arms did the same work: their losses agree to 1e-4 relative."""
    ours, theirs = (float(race.facts[a]["loss"]) for a in (arm, comparator))
    agrees = abs(ours - theirs) <= 1e-4 * abs(theirs)
    found = f"loss {theirs:.5f}" if agrees else f"loss {ours:.5f}"
    return CountLine(race.row, race.size, arm, comparator, found, f"loss {theirs:.5f}")


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    small = "tiny" if options.is_smoke else "mlp"
    work = [(small, n, 20) for n in options.sizes(1, 2, 4, 8)]
    if not options.is_smoke:
        work += [("transformer", n, 2) for n in options.sizes(1, 8, full=(1, 2, 4, 8))]
    for name, n, steps in work:
        arms = {
            "run": arm(api_training, name=name, n=n),
            "jit(shard_map)": arm(hand_training, name=name, n=n),
        }
        race = bench.race(f"{name}, N={n}", arms, options.steps(steps))
        yield race.line("run", "jit(shard_map)", Need(1.03))
        yield same_loss(race, "run", "jit(shard_map)")
