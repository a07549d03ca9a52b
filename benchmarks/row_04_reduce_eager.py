"""Reading a summed scalar after a step is faster than in TensorFlow.

Claim: `float(strategy.reduce("SUM", value, axis=None))` of a value that a step has just made takes
at most 0.8 of the time of TensorFlow's eager `strategy.reduce`. Making the values is not timed,
and each is new: JAX keeps the host copy of an array that was read before.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import per_replica, strategy
from benchmarks.row_01_run_overhead_1leaf import plus_one

ROW = "4"


def fresh_values(n: int, x: jax.Array, steps: int) -> list[Any]:
    """Results of that many steps, computed and not read yet."""
    chosen = strategy(n)
    given = per_replica(n, x)
    values = [chosen.run(plus_one, (given,)) for _ in range(steps)]
    jax.block_until_ready(values)
    return values


def local_scalar(x: jax.Array) -> jax.Array:
    """One scalar per replica."""
    return x.sum() + 1


def api(n: int) -> Loop:
    """Through `strategy.reduce`."""
    chosen = strategy(n)
    given = per_replica(n, jnp.zeros(n))
    values: list[Any] = []

    def prepare(steps: int) -> None:
        values[:] = [chosen.run(local_scalar, (given,)) for _ in range(steps)]
        jax.block_until_ready(values)

    def loop(_: int) -> None:
        for value in values:
            float(chosen.reduce("SUM", value, axis=None))

    return Loop(loop, prepare)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("reduce against TensorFlow's")
    if skipped:
        yield skipped
        return
    for n in bench.options.sizes(1, 2, 4, 8):
        arms = {
            "reduce": arm(api, n=n),
            "tf reduce": tensorflow_arm(_tensorflow.reduce_sum, n=n),
        }
        race = bench.race(f"N={n}", arms, bench.options.steps(200))
        yield race.line("reduce", "tf reduce", Need(0.8))
