"""A job goes on as fast while strangers send requests that no client of jaxdist makes.

Claim: 1 server and 2 workers that train an MLP of 10 variables (3.3 MB) at batch 16 reach at least
0.8 of their steps/s while a server gets malformed requests: other secrets, any bytes, damaged and
unfinished messages, headers that ask for any memory. Every step counts, and the net learns.

The strangers are one process, which also needs a part of the processors.
"""

from collections.abc import Iterator

from benchmarks import _strangers
from benchmarks._bench import Bench, arm
from benchmarks._lines import CountLine, Line, Need, NoteLine

ROW = "strangers"
BESIDE, ALONE = "beside strangers", "without"
BATCH = 16


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    arms = {
        BESIDE: arm(_strangers.train, batch=BATCH, strangers=True),
        ALONE: arm(_strangers.train, batch=BATCH, strangers=False),
    }
    size = f"MLP, batch {BATCH}"
    # A burst is long enough for requests of all kinds.
    steps = bench.options.steps(80)
    race = bench.race(size, arms, steps, devices=1, times_rounds=3)
    yield race.line(BESIDE, ALONE, Need(1 / 0.8))
    facts = dict(race.facts[BESIDE])
    yield NoteLine(ROW, f"strangers sent {facts.pop(_strangers.RATE):.0f} requests in a second")
    for fact, found in facts.items():
        yield CountLine(ROW, size, BESIDE, "needed", f"{fact}: {found}", f"{fact}: True")
