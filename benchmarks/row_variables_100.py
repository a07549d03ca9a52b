"""Variables that a step assigns cost little over state that goes through it.

Claim: a step that assigns 100 `jaxdist.Variable` in place takes at most 1.05 times the same step
on a dictionary of 100 arrays, which the result replaces; both through `strategy.run`, and both
come to the same values.

Neither donates: who has read a variable keeps what was read. The dictionary donated, whose arrays
are gone after the step, is reported.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jaxdist
from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import DONATE, strategy
from benchmarks.row_02_run_overhead_100leaf import leaves, plus_one

ROW = "variables"


def api(n: int) -> Loop:
    """Variables that the step has from its closure."""
    chosen = strategy(n)
    with chosen.scope():
        variables = [jaxdist.Variable(np.zeros(4, "float32")) for _ in range(100)]

    def step() -> None:
        for variable in variables:
            variable.assign(variable.value() + 1, read_value=False)

    def values() -> Sequence[jax.Array]:
        return [v.value() for v in variables]

    def loop(steps: int) -> None:
        for _ in range(steps):
            chosen.run(step)
        jax.block_until_ready(values())

    return Loop(loop, facts=_total(values))


def functional(n: int, donate: bool) -> Loop:
    """A dictionary that goes in and comes out."""
    chosen = strategy(n)
    options = DONATE if donate else None
    held: list[Any] = [leaves(n)]

    def loop(steps: int) -> None:
        value = held[0]
        for _ in range(steps):
            value = chosen.run(plus_one, (value,), options=options)
        held[0] = jax.block_until_ready(value)

    return Loop(loop, facts=_total(lambda: list(held[0].values())))


def _total(values: Callable[[], Sequence[jax.Array]]) -> Callable[[], dict[str, Any]]:
    return lambda: {"total": sum(float(np.asarray(v).sum()) for v in values())}


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for n in bench.options.sizes(1, 8, full=(1, 2, 4, 8)):
        arms = {
            "run(), variables": arm(api, n=n),
            "run(dict)": arm(functional, n=n, donate=False),
            "run(dict), donated": arm(functional, n=n, donate=True),
        }
        race = bench.race(f"N={n}", arms, bench.options.steps(400))
        yield race.line("run(), variables", "run(dict)", Need(1.05))
        yield race.same("total", "run(), variables", "run(dict)")
        yield race.line("run(), variables", "run(dict), donated", Need())
