"""A training step through the API is no slower than `jit` with shardings, or `pmap`.

Claim: at 2 and more replicas at most 1.00 times either, on the models of row 6. At one replica it
is reported only.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._models import Batch, Params, model, sgd
from benchmarks._steps import AXIS, STEPS_IN_FLIGHT, P, api_training, mesh, training_loop
from benchmarks.row_06_step_parity import same_loss

ROW = "7"


def gspmd(name: str, n: int) -> Loop:
    """The whole batch in one `jit`, with the shardings of arguments and results given."""
    params, batch, loss_fn = model(name)
    replicated = NamedSharding(mesh(n), P())
    split = NamedSharding(mesh(n), P(AXIS))

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return sgd(params, grads), loss

    call = jax.jit(
        step,
        in_shardings=(replicated, split),
        out_shardings=(replicated, replicated),
        donate_argnums=0,
    )
    params = jax.device_put(params, replicated)
    batch = jax.device_put(batch, split)
    return training_loop(call, params, batch, wait_every=STEPS_IN_FLIGHT)


def pmap(name: str, n: int) -> Loop:
    """`pmap` with one `pmean`."""
    params, batch, loss_fn = model(name)

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(params, batch), AXIS)
        return sgd(params, grads), loss

    devices = jax.devices()[:n]
    call: Any = jax.pmap(step, axis_name=AXIS, devices=devices, donate_argnums=(0,))
    spread: Any = jax.pmap(lambda x: x, devices=devices)
    params = spread(jax.tree.map(lambda x: np.stack([x] * n), params))
    batch = spread(jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), batch))
    return training_loop(call, params, batch, wait_every=STEPS_IN_FLIGHT)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    small = "tiny" if options.is_smoke else "mlp"
    work = [(small, n, 15) for n in options.sizes(2, 4, 8, full=(1, 2, 4, 8))]
    if not options.is_smoke:
        work += [("transformer", n, 2) for n in options.sizes(8, full=(2, 4, 8))]
    for name, n, steps in work:
        arms = {
            "run": arm(api_training, name=name, n=n),
            "jit + shardings": arm(gspmd, name=name, n=n),
            "pmap": arm(pmap, name=name, n=n),
        }
        race = bench.race(f"{name}, N={n}", arms, options.steps(steps))
        for comparator in ("jit + shardings", "pmap"):
            yield race.line("run", comparator, Need(1.0) if n > 1 else Need())
            yield same_loss(race, "run", comparator)
