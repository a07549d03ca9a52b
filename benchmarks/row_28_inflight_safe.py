"""A tight loop that never waits neither hangs nor costs more than one that waits each step.

Claim: 10,000 steps with an all-reduce on 8 virtual CPU devices, never waited for and with NPROC
unset, finish with either JAX (raw JAX 0.10.2 aborts), and take at most 1.10 times a loop that
waits for each step; so do 400 steps of the MLP at 2, 4 and 8 replicas.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import jaxdist
from benchmarks._bench import Bench, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._loop import Loop
from benchmarks._models import model
from benchmarks._process import ArmError
from benchmarks._steps import (
    AXIS,
    DONATE,
    P,
    api_step,
    hand_step,
    mesh,
    per_replica,
    strategy,
    training_loop,
)

ROW = "28"
STEPS = 10_000


def scalar_step(state: jax.Array, x: jax.Array) -> jax.Array:
    """A step that is all dispatch: one all-reduced scalar added to the state."""
    return state + jaxdist.get_replica_context().all_reduce("sum", x.sum())


def api(n: int, wait: bool) -> Loop:
    """The small step through `strategy.run`."""
    chosen = strategy(n)
    x = per_replica(n, jnp.ones(n))
    held: list[Any] = [jax.device_put(np.zeros((), "float32"), chosen.replicated_sharding)]

    def loop(steps: int) -> None:
        state = held[0]
        for _ in range(steps):
            state = chosen.run(scalar_step, (state, x))
            if wait:
                jax.block_until_ready(state)
        held[0] = jax.block_until_ready(state)

    return Loop(loop)


def hand(n: int) -> Loop:
    """The small step by hand, waiting for each."""

    def step(state: jax.Array, x: jax.Array) -> jax.Array:
        return state + jax.lax.psum(x.sum(), AXIS)

    call = jax.jit(
        jax.shard_map(step, mesh=mesh(n), in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False)
    )
    x = jax.device_put(jnp.ones(n), NamedSharding(mesh(n), P(AXIS)))
    held: list[Any] = [jax.device_put(np.zeros((), "float32"), NamedSharding(mesh(n), P()))]

    def loop(steps: int) -> None:
        state = held[0]
        for _ in range(steps):
            state = jax.block_until_ready(call(state, x))
        held[0] = state

    return Loop(loop)


def api_mlp(name: str, n: int) -> Loop:
    """Training through `strategy.run`, never waiting."""
    params, batch, loss_fn = model(name)
    chosen, step = strategy(n), api_step(loss_fn)
    split = jax.tree.map(lambda x: per_replica(n, x), batch)
    params = jax.device_put(params, chosen.replicated_sharding)

    def call(params: Any, batch: Any) -> Any:
        return chosen.run(step, (params, batch), options=DONATE)

    return training_loop(call, params, split, wait_every=None)


def hand_mlp(name: str, n: int) -> Loop:
    """Training by hand, waiting for each step."""
    params, batch, loss_fn = model(name)
    params = jax.device_put(params, NamedSharding(mesh(n), P()))
    batch = jax.device_put(batch, NamedSharding(mesh(n), P(AXIS)))
    return training_loop(hand_step(loss_fn, n), params, batch, wait_every=1)


def finishes(n: int, steps: int) -> bool:
    """Whether so many steps come to the right sum."""
    chosen = strategy(n)
    x = per_replica(n, jnp.ones(n))
    state: Any = jax.device_put(np.zeros((), "float32"), chosen.replicated_sharding)
    for _ in range(steps):
        state = chosen.run(scalar_step, (state, x))
    return float(state) == float(n * steps)


def run(bench: Bench) -> Iterator[Line]:
    """Count, then compare."""
    options = bench.options
    steps = 50 if options.is_smoke else STEPS
    for n in options.sizes(8, full=(2, 4, 8)):
        size = f"{steps:,} steps, N={n}"
        options.report(f"row {ROW}: {size}")
        try:
            ended = bench.process("0").call(finishes, timeout_s=180, n=n, steps=steps)
        except ArmError as error:
            ended = str(error).splitlines()[0]
        found = "finishes" if ended is True else f"does not: {ended}"
        yield CountLine(ROW, size, "run, never waiting", "", found, "finishes")
        arms = {
            "run, never waiting": arm(api, n=n, wait=False),
            "run, waiting each step": arm(api, n=n, wait=True),
            "by hand, waiting each step": arm(hand, n=n),
        }
        burst = STEPS if options.is_full else options.steps(1000)
        race = bench.race(f"{burst:,} steps, N={n}", arms, burst)
        yield race.line("run, never waiting", "run, waiting each step", Need(1.10))
        yield race.line("run, never waiting", "by hand, waiting each step", Need(1.10))
    name = "tiny" if options.is_smoke else "mlp"
    for n in options.sizes(8, full=(2, 4, 8)):
        arms = {
            "run, never waiting": arm(api_mlp, name=name, n=n),
            "by hand, waiting each step": arm(hand_mlp, name=name, n=n),
        }
        burst = 400 if options.is_full else options.steps(40)
        race = bench.race(f"{name}, {burst} steps, N={n}", arms, burst)
        yield race.line("run, never waiting", "by hand, waiting each step", Need(1.10))
