"""Gathering small values costs about what reading the array costs.

Claim: at 2 and more replicas `strategy.gather` of (2, 4) per replica takes at most 1.2 times
`np.asarray` of the global array, and at most 0.02 of TensorFlow's eager `strategy.gather`. Values
are new each time, as in row 4.

`np.asarray` ends in an array of NumPy, and a gather in one of JAX, which takes some microseconds to
make. So a third loop makes the same result by hand: `jax.device_put(np.asarray(array))`. Against
that one the need is 1.05.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _tensorflow
from benchmarks._bench import Bench, arm, tensorflow_arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import strategy
from benchmarks.row_04_reduce_eager import fresh_values

ROW = "5"


def api(n: int) -> Loop:
    """Through `strategy.gather`."""
    chosen = strategy(n)
    values: list[Any] = []

    def prepare(steps: int) -> None:
        values[:] = fresh_values(n, jnp.zeros((2 * n, 4)), steps)

    def loop(_: int) -> None:
        for value in values:
            chosen.gather(value, axis=0)

    return Loop(loop, prepare)


def by_hand(n: int, ends_in_jax: bool) -> Loop:
    """Reading the global array, and making a JAX array of it if asked for."""
    values: list[Any] = []

    def prepare(steps: int) -> None:
        made = fresh_values(n, jnp.zeros((2 * n, 4)), steps)
        values[:] = jax.tree.leaves(made)

    def to_numpy(_: int) -> None:
        for value in values:
            np.asarray(value)

    def to_jax(_: int) -> None:
        for value in values:
            jax.device_put(np.asarray(value))

    return Loop(to_jax if ends_in_jax else to_numpy, prepare)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    skipped = bench.without_tensorflow("gather against TensorFlow's")
    for n in bench.options.sizes(1, 2, 4, 8):
        arms = {"gather": arm(api, n=n), "np.asarray": arm(by_hand, n=n, ends_in_jax=False)}
        if n > 1:
            arms["array by hand"] = arm(by_hand, n=n, ends_in_jax=True)
        steps = {label: bench.options.steps(200) for label in arms}
        if not skipped and n > 1:
            arms["tf gather"] = tensorflow_arm(_tensorflow.gather, n=n)
            # It traces anew at every call: a tenth of a second and more each.
            steps["tf gather"] = 1
        race = bench.race(f"N={n}", arms, steps)
        # With one replica there is nothing to gather, and NumPy reads without a copy.
        yield race.line("gather", "np.asarray", Need(1.2) if n > 1 else Need())
        if n > 1:
            yield race.line("gather", "array by hand", Need(1.05))
        if "tf gather" in arms:
            yield race.line("gather", "tf gather", Need(0.02))
            # TensorFlow cannot gather over groups of two sizes in one process.
            bench.close("tf gather")
    if skipped:
        yield skipped
