"""The sharded update takes less time and less memory than the replicated one.

Claim: Adam on the transformer (9.65M parameters) with 8 replicas takes at most 0.80 of the time of
jaxdist's replicated update and at most 0.50 of its arguments (parameters, state and batch) on each
device; the losses agree to 1e-5. The memory for temporary values is reported.
"""

from collections.abc import Iterator
from typing import Any

import jax
import optax

import jaxdist
from benchmarks._bench import Bench, Race, arm
from benchmarks._lines import CountLine, Line, Need
from benchmarks._loop import Loop
from benchmarks._models import Batch, Params, model
from benchmarks._steps import per_replica, strategy

ROW = "17"
LEARNING_RATE = 1e-3
DONATE = jaxdist.RunOptions(donate_argnums=(0, 1))


def training(name: str, n: int, how: str) -> Loop:
    """Training with Adam: `replicated`, or sharded by `update` or by `apply_gradients`."""
    params, batch, loss_fn = model(name)
    chosen = strategy(n)
    plain = optax.adam(LEARNING_RATE)
    sharded = jaxdist.sharded_update(plain, min_bytes=0 if name == "tiny" else None)

    def step(params: Params, state: Any, batch: Batch) -> Any:
        found = jax.value_and_grad(loss_fn)(params, batch)
        if how == "replicated":
            loss, grads = jaxdist.get_replica_context().all_reduce("mean", found)
            updates, state = plain.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss
        loss, grads = found
        loss = jaxdist.get_replica_context().all_reduce("mean", loss)
        if how == "apply_gradients":
            params, state = sharded.apply_gradients(grads, state, params)
            return params, state, loss
        updates, state = sharded.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.device_put(params, chosen.replicated_sharding)
    with chosen.scope():
        state = (plain if how == "replicated" else sharded).init(params)
    if how == "replicated":
        state = jax.device_put(state, chosen.replicated_sharding)
    split = jax.tree.map(lambda x: per_replica(n, x), batch)
    compiled = chosen.lower(step, (params, state, split), options=DONATE).compile()
    memory: Any = compiled.executable.memory_analysis()
    held: dict[str, Any] = {"params": params, "state": state, "loss": None}

    def run(steps: int) -> None:
        for _ in range(steps):
            held["params"], held["state"], held["loss"] = chosen.run(
                step, (held["params"], held["state"], split), options=DONATE
            )
        jax.block_until_ready(held)

    def facts() -> dict[str, Any]:
        return {
            "loss": float(held["loss"]),
            "state": sum(
                x.addressable_shards[0].data.nbytes
                for x in jax.tree.leaves((held["params"], held["state"]))
            ),
            "temporary": int(memory.temp_size_in_bytes),
        }

    return Loop(run, facts=facts)


def same_loss(race: Race, ours: str, theirs: str) -> CountLine:
    """Whether the losses agree to 1e-5."""
    mine, other = (float(race.facts[a]["loss"]) for a in (ours, theirs))
    agrees = abs(mine - other) <= 1e-5 * abs(other)
    wanted = f"loss {other:.6f}"
    return CountLine(
        race.row, race.size, ours, theirs, wanted if agrees else f"loss {mine:.6f}", wanted
    )


def memory_line(race: Race, ours: str, theirs: str, most: float) -> CountLine:
    """Parameters and state on each device, counted from the arrays, and temporary values."""

    def share(fact: str) -> float:
        return float(race.facts[ours][fact]) / max(float(race.facts[theirs][fact]), 1.0)

    state, wanted = share("state"), f"state <= {most:.2f}"
    size = (
        f"{race.size}: parameters and state {state:.2f}, temporary values {share('temporary'):.2f}"
    )
    found = wanted if state <= most else f"state {state:.2f}"
    return CountLine(race.row, size, ours, theirs, found, wanted)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    name = "tiny" if options.is_smoke else "transformer"
    for n in options.sizes(8, full=(2, 4, 8)):
        arms = {
            how: arm(training, name=name, n=n, how=how)
            for how in ("replicated", "update", "apply_gradients")
        }
        race = bench.race(f"{name}, Adam, N={n}", arms, options.steps(2))
        needed = Need(0.80) if n == 8 else Need()
        for how in ("update", "apply_gradients"):
            yield race.line(how, "replicated", needed)
            yield same_loss(race, how, "replicated")
            if n == 8:
                yield memory_line(race, how, "replicated", 0.50)
