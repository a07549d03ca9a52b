"""The rows: times of what costs something else on an accelerator, and checks of what it gives."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from benchmarks import row_01_run_overhead_1leaf as one_leaf
from benchmarks import row_02_run_overhead_100leaf as many_leaves
from benchmarks import row_21_input_overlap as ahead
from benchmarks._lines import CountLine, Line, Need, NoteLine
from benchmarks._loop import Loop
from benchmarks._models import Batch, Params, model
from benchmarks._steps import (
    DONATE,
    api_step,
    api_training,
    hand_step,
    hand_training,
    mesh,
    training_loop,
)
from benchmarks.accelerator._compiled import compiled
from benchmarks.accelerator._contracts import contracts
from benchmarks.accelerator._host_memory import host_memory
from benchmarks.accelerator._numerics import numerics
from benchmarks.accelerator._plan import plan
from benchmarks.accelerator._race import race


def _run_1(is_smoke: bool) -> Iterator[Line]:
    arms = {"run": lambda: one_leaf.api(1), "jit(shard_map)": lambda: one_leaf.hand(1)}
    need = Need(1.35)
    yield race("run-1", "1 leaf", arms, 4000, need, is_smoke=is_smoke)[0]


def _run_100(is_smoke: bool) -> Iterator[Line]:
    for donate in (False, True):
        arms = {
            "run": lambda donate=donate: many_leaves.api(1, donate),
            "jit(shard_map)": lambda donate=donate: many_leaves.hand(1, donate),
        }
        size = "100 leaves, donated" if donate else "100 leaves"
        yield race("run-100", size, arms, 400, Need(1.05), is_smoke=is_smoke)[0]


def _names(is_smoke: bool) -> tuple[str, ...]:
    return ("tiny",) if is_smoke else ("mlp", "transformer")


def _step(is_smoke: bool) -> Iterator[Line]:
    for name in _names(is_smoke):
        arms = {
            "run": lambda name=name: api_training(name, 1),
            "jit(shard_map)": lambda name=name: hand_training(name, 1),
        }
        line, loops = race("step", name, arms, 200, Need(1.05), is_smoke=is_smoke)
        yield line
        ours, theirs = (f"loss {loop.facts()['loss']:.4f}" for loop in loops.values())
        yield CountLine("step", name, "run", "jit(shard_map)", ours, theirs)


def _ahead(is_smoke: bool) -> Iterator[Line]:
    """Batches of a NumPy source, read and sent while the device works."""
    sizes = _names(is_smoke)
    by_hand = {
        "run(next)": lambda: ahead.api(sizes[0], 1),
        "jit(device_put(next))": lambda: _send_by_hand(sizes[0]),
    }
    yield race("ahead", sizes[0], by_hand, 200, Need(1.05), is_smoke=is_smoke)[0]
    # A step has to take longer than sending its batch, or nothing can hide the sending.
    resident = {
        "run(next)": lambda: ahead.api(sizes[-1], 1),
        "run(resident)": lambda: api_training(sizes[-1], 1),
    }
    yield race("ahead", sizes[-1], resident, 100, Need(1.10), is_smoke=is_smoke)[0]


def _send_by_hand(name: str) -> Loop:
    """The training step by hand, on batches that `device_put` sends."""
    params, batch, loss_fn = model(name)
    device = jax.devices()[0]
    step, batches = hand_step(loss_fn, 1), ahead.shuffled(batch)

    def call(params: Params, _: Batch) -> tuple[Params, jax.Array]:
        result: tuple[Params, jax.Array] = step(params, jax.device_put(next(batches), device))
        return result

    placed = jax.device_put(params, jax.sharding.NamedSharding(mesh(1), jax.P()))
    return training_loop(call, placed, batch, wait_every=None)


def _trained(strategy: jaxdist.Strategy, name: str, steps: int) -> tuple[Params, list[Params]]:
    """Parameters after some donated steps, and all that they were before."""
    params, batch, loss_fn = model(name)
    step = api_step(loss_fn)
    [given] = strategy.experimental_distribute_dataset([batch])
    held = jax.device_put(params, strategy.replicated_sharding)
    before: list[Params] = []
    for _ in range(steps):
        before.append(held)
        held, _ = strategy.run(step, (held, given), options=DONATE)
    return jax.block_until_ready(held), before


def _first() -> jaxdist.Strategy:
    return jaxdist.MirroredStrategy(jax.devices()[:1])


def _donation(is_smoke: bool) -> Iterator[Line]:
    """Donated state is gone, and new state lies in its place."""
    name = _names(is_smoke)[0]
    params, batch, loss_fn = model(name)
    strategy = _first()
    step = api_step(loss_fn)
    [given] = strategy.experimental_distribute_dataset([batch])
    held = jax.block_until_ready(jax.device_put(params, strategy.replicated_sharding))
    held, _ = strategy.run(step, (held, given), options=DONATE)  # it compiled
    places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(jax.block_until_ready(held))}
    new, _ = strategy.run(step, (held, given), options=DONATE)
    leaves = jax.tree.leaves(jax.block_until_ready(new))
    gone = sum(x.is_deleted() for x in jax.tree.leaves(held))
    same = sum(x.unsafe_buffer_pointer() in places for x in leaves)
    every = f"{len(leaves)} of {len(leaves)}"
    yield CountLine("donation", name, "old leaves deleted", "", f"{gone} of {len(leaves)}", every)
    yield CountLine("donation", name, "new in their place", "", f"{same} of {len(leaves)}", every)


def _repeat(is_smoke: bool) -> Iterator[Line]:
    """The same training again: with `deterministic=True` the same bits, else it is told."""
    name, steps = _names(is_smoke)[0], 3 if is_smoke else 20
    for deterministic in (False, True):
        strategies = [
            jaxdist.MirroredStrategy(jax.devices()[:1], deterministic=deterministic)
            for _ in range(2)
        ]
        one, other = (_trained(s, name, steps)[0] for s in strategies)
        words = _difference(one, other)
        if deterministic:
            yield CountLine("repeat", name, "deterministic=True", "again", words, "same bits")
        else:
            yield NoteLine("repeat", f"{name}, {steps} steps, and again: {words}")


def _difference(one: Params, other: Params) -> str:
    pairs = list(zip(*map(jax.tree.leaves, jax.device_get((one, other))), strict=True))
    differ = [(a, b) for a, b in pairs if a.tobytes() != b.tobytes()]
    if not differ:
        return "same bits"
    largest = max(float(np.abs(a - b).max()) for a, b in differ)
    return f"{len(differ)} of {len(pairs)} leaves differ, by up to {largest:.1e}"


def _virtual(is_smoke: bool) -> Iterator[Line]:
    """Collectives of 8 virtual replicas on this one device, against NumPy."""
    del is_smoke
    strategy = jaxdist.MirroredStrategy(jax.devices()[:1], deterministic=8)
    rows = np.arange(8 * 16, dtype="float32").reshape(8, 16)

    def step(x: Any, large: Any) -> Any:
        context = jaxdist.get_replica_context()
        return (
            context.all_reduce("sum", x),
            context.all_reduce("mean", x),
            context.all_reduce("mean", large),
            context.all_gather(x, axis=0),
        )

    given = jaxdist.PerReplica(list(rows[:, None, :]))
    large = jaxdist.PerReplica([jnp.float16(60000)] * 8)
    total, mean, of_large, gathered = map(np.asarray, strategy.run(step, (given, large)))
    right = [
        np.array_equal(total[0], rows.sum(0)),
        np.array_equal(mean[0], rows.mean(0)),
        float(of_large) == 60000.0,
        np.array_equal(gathered, rows),
    ]
    what = "sum, mean, mean of large float16, gather"
    yield CountLine(
        "virtual", "8 replicas", what, "NumPy", f"{sum(right)} of 4 right", "4 of 4 right"
    )


def _bf16(is_smoke: bool) -> Iterator[Line]:
    """Collectives of bfloat16: the units in the last place by which they differ from float64."""
    count = 8
    rows = max(count, len(jax.devices()))
    drawn = np.random.default_rng(0).normal(size=(rows, 64 if is_smoke else 1 << 20))
    given = [jnp.asarray(row[None], jnp.bfloat16) for row in drawn]
    exact = np.stack([np.asarray(x, "float64")[0] for x in given])
    scale = float(np.abs(exact).sum(0).max()) * float(jnp.finfo(jnp.bfloat16).eps)
    strategies = {"virtual": jaxdist.MirroredStrategy(jax.devices()[:1], deterministic=count)}
    if len(jax.devices()) > 1:
        strategies["all devices"] = jaxdist.MirroredStrategy()

    def step(x: Any) -> Any:
        context = jaxdist.get_replica_context()
        return context.all_reduce("sum", x), context.all_reduce("mean", x)

    for name, strategy in strategies.items():
        replicas = strategy.num_replicas_in_sync
        wanted = exact[:replicas].sum(0)
        total, mean = strategy.run(step, (jaxdist.PerReplica(given[:replicas]),))
        off = [
            float(np.abs(np.asarray(found, "float64")[0] - right).max()) / scale
            for found, right in ((total, wanted), (mean, wanted / replicas))
        ]
        near = "within 4" if max(off) <= 4 else f"{max(off):.1f}"
        size = f"{replicas} replicas, {name}"
        yield CountLine("bf16", size, "sum and mean", "float64", near, "within 4")


def _listed(row: Callable[[bool], Iterator[Line]]) -> Callable[[bool], list[Line]]:
    return lambda is_smoke: list(row(is_smoke))


ROWS: dict[str, Callable[[bool], list[Line]]] = {
    "run-1": _listed(_run_1),
    "run-100": _listed(_run_100),
    "step": _listed(_step),
    "ahead": _listed(_ahead),
    "donation": _listed(_donation),
    "compiled": _listed(compiled),
    "plan": _listed(plan),
    "repeat": _listed(_repeat),
    "virtual": _listed(_virtual),
    "bf16": _listed(_bf16),
    "numerics": _listed(numerics),
    "host-memory": _listed(host_memory),
    # The last one: it sets options of JAX.
    "contracts": _listed(contracts),
}
