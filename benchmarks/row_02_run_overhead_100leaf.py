"""`strategy.run` of 100 leaves costs nothing that can be seen over the compiled function.

Claim: at most 1.05 times a hand-written `jit(shard_map)` call on a dictionary of 100 mirrored
leaves, at any number of replicas, donated (the result goes into the next step) and not.

A donated step looks at its arrays before it starts: one that is given twice, or was donated before,
ends the process on several CPU devices. So with donation a third loop has the same protection,
written by hand. Against that one the need is 1.05 too.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import DONATE, P, mesh, strategy

ROW = "2"


def plus_one(tree: Any) -> Any:
    """The step."""
    return jax.tree.map(lambda x: x + 1, tree)


def leaves(n: int) -> Any:
    """100 small leaves, replicated over `n` devices."""
    sharding = NamedSharding(mesh(n), P())
    return {f"leaf{i}": jax.device_put(np.zeros(4, "float32"), sharding) for i in range(100)}


def api(n: int, donate: bool) -> Loop:
    """Through `strategy.run`."""
    chosen = strategy(n)
    held = [leaves(n)]

    def same(steps: int) -> None:
        value = given = held[0]
        for _ in range(steps):
            value = chosen.run(plus_one, (given,))
        jax.block_until_ready(value)

    def carried(steps: int) -> None:
        value = held[0]
        for _ in range(steps):
            value = chosen.run(plus_one, (value,), options=DONATE)
        held[0] = jax.block_until_ready(value)

    return Loop(carried if donate else same)


def hand(n: int, donate: bool) -> Loop:
    """The compiled function by hand."""
    mapped = jax.shard_map(plus_one, mesh=mesh(n), in_specs=P(), out_specs=P(), check_vma=False)
    call = jax.jit(mapped, donate_argnums=(0,) if donate else ())
    held = [leaves(n)]

    def same(steps: int) -> None:
        value = given = held[0]
        for _ in range(steps):
            value = call(given)
        jax.block_until_ready(value)

    def carried(steps: int) -> None:
        value = held[0]
        for _ in range(steps):
            value = call(value)
        held[0] = jax.block_until_ready(value)

    return Loop(carried if donate else same)


def checked(n: int) -> Loop:
    """The compiled function by hand, after a look for arrays that are gone or are there twice."""
    mapped = jax.shard_map(plus_one, mesh=mesh(n), in_specs=P(), out_specs=P(), check_vma=False)
    call = jax.jit(mapped, donate_argnums=(0,))
    held = [leaves(n)]

    def carried(steps: int) -> None:
        value = held[0]
        for _ in range(steps):
            given = value.values()
            if len(set(map(id, given))) != len(given) or any(x.is_deleted() for x in given):
                raise ValueError("an array is given twice, or was donated before")
            value = call(value)
        held[0] = jax.block_until_ready(value)

    return Loop(carried)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for n in bench.options.sizes(1, 2, 4, 8):
        for donate in (False, True):
            steps = bench.options.steps(400 if n == 1 else 100)
            arms = {
                "run": arm(api, n=n, donate=donate),
                "jit(shard_map)": arm(hand, n=n, donate=donate),
            }
            if donate and n > 1:
                arms["checked by hand"] = arm(checked, n=n)
            size = f"N={n}, donated" if donate else f"N={n}"
            race = bench.race(size, arms, steps, in_one_process=True, times_rounds=2)
            yield race.line("run", "jit(shard_map)", Need(1.05))
            if donate and n > 1:
                yield race.line("run", "checked by hand", Need(1.05))
