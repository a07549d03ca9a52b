"""An NNX model as an argument costs little over a functional loop over its split state.

Claim: a step that updates a model of 100 variables in place, through `strategy.run`, takes at most
1.10 times the hand-written loop that carries `nnx.state` through a `jit(shard_map)`; both donate.
The same loop over a bare list of arrays, which NNX cannot slow down, is reported.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import DONATE, P, mesh, strategy

ROW = "nnx"


class Hundred(nnx.Module):
    """100 small variables."""

    def __init__(self) -> None:
        self.leaves = nnx.List([nnx.Param(np.zeros(4, "float32")) for _ in range(100)])


def plus_one(net: Hundred) -> None:
    """The step."""
    for leaf in net.leaves:
        leaf[...] = leaf[...] + 1


def api(n: int) -> Loop:
    """The model itself through `strategy.run`."""
    chosen = strategy(n)
    net = Hundred()

    def loop(steps: int) -> None:
        for _ in range(steps):
            chosen.run(plus_one, (net,), options=DONATE)
        jax.block_until_ready(nnx.state(net))

    return Loop(loop)


def hand(n: int, bare: bool) -> Loop:
    """The split state through `jit(shard_map)`, as NNX makes it or as a bare list of arrays."""
    graph, state = nnx.split(Hundred())
    state = jax.device_put(state, NamedSharding(mesh(n), P()))
    leaves, treedef = jax.tree.flatten(state)

    def step(given: Any) -> Any:
        net = nnx.merge(graph, jax.tree.unflatten(treedef, given) if bare else given)
        plus_one(net)
        after = nnx.state(net)
        return jax.tree.leaves(after) if bare else after

    mapped = jax.shard_map(step, mesh=mesh(n), in_specs=P(), out_specs=P(), check_vma=False)
    call = jax.jit(mapped, donate_argnums=0)
    held: list[Any] = [leaves if bare else state]

    def loop(steps: int) -> None:
        value = held[0]
        for _ in range(steps):
            value = call(value)
        held[0] = jax.block_until_ready(value)

    return Loop(loop)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    for n in bench.options.sizes(1, 8, full=(1, 2, 4, 8)):
        arms = {
            "run(model)": arm(api, n=n),
            "jit(shard_map)(state)": arm(hand, n=n, bare=False),
            "jit(shard_map)(list)": arm(hand, n=n, bare=True),
        }
        race = bench.race(f"N={n}", arms, bench.options.steps(200 if n == 1 else 60))
        yield race.line("run(model)", "jit(shard_map)(state)", Need(1.10))
        yield race.line("run(model)", "jit(shard_map)(list)", Need())
