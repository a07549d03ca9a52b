"""`strategy.run` of one leaf costs next to nothing over calling the compiled function.

Claim: at one replica at most 1.35 times a hand-written `jit(shard_map)` call, and at most 2 us
more; at 2, 4 and 8 replicas at most 1.10 times. The step is `x + 1`, its result goes into the next
step, and values that differ between replicas are `PerReplica` in and out.

On several CPU devices a pause of one microsecond between two calls makes each step some ten
microseconds longer, since the threads of the devices go to sleep and are woken again. So a third
loop has the same protection as `run`, written by hand: a pytree node that marks the value as one
that differs. Against that one the need is 1.05 at every number of replicas.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import register_dataclass

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import AXIS, P, mesh, per_replica, strategy

ROW = "1"


def plus_one(x: jax.Array) -> jax.Array:
    """The step."""
    return x + 1


def api(n: int) -> Loop:
    """Through `strategy.run`."""
    chosen = strategy(n)
    x = per_replica(n, jnp.zeros(n))
    run = chosen.run

    def loop(steps: int) -> None:
        value: Any = x
        for _ in range(steps):
            value = run(plus_one, (value,))
        jax.block_until_ready(value)

    return Loop(loop)


def hand(n: int) -> Loop:
    """The compiled function by hand."""
    call = jax.jit(
        jax.shard_map(plus_one, mesh=mesh(n), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    )
    x = jax.device_put(jnp.zeros(n), NamedSharding(mesh(n), P(AXIS)))

    def loop(steps: int) -> None:
        value = x
        for _ in range(steps):
            value = call(value)
        jax.block_until_ready(value)

    return Loop(loop)


@register_dataclass
@dataclasses.dataclass
class Marked:
    """An array whose rows belong to one replica each."""

    array: jax.Array


def marked(n: int) -> Loop:
    """The compiled function by hand, of a value that is marked as one that differs."""
    mapped = jax.shard_map(
        plus_one, mesh=mesh(n), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    call = jax.jit(lambda x: Marked(mapped(x.array)))
    x = Marked(jax.device_put(jnp.zeros(n), NamedSharding(mesh(n), P(AXIS))))

    def loop(steps: int) -> None:
        value = x
        for _ in range(steps):
            value = call(value)
        jax.block_until_ready(value)

    return Loop(loop)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for n in bench.options.sizes(1, 2, 4, 8):
        steps = bench.options.steps(4000 if n == 1 else 500)
        arms = {"run": arm(api, n=n), "jit(shard_map)": arm(hand, n=n)}
        if n > 1:
            arms["marked by hand"] = arm(marked, n=n)
        need = Need(1.35, more_us=2) if n == 1 else Need(1.10)
        race = bench.race(f"N={n}", arms, steps, in_one_process=True, times_rounds=4)
        yield race.line("run", "jit(shard_map)", need)
        if n > 1:
            yield race.line("run", "marked by hand", Need(1.05))
