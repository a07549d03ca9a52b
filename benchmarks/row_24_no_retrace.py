"""A loop traces its step once and compiles it once.

Claim: 100 steps on new `PerReplica` objects are one trace; a loop of 1,000 steps that starts from
host arrays and carries its state is one compilation; and so it is with an NNX model.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdist
from benchmarks._bench import Bench
from benchmarks._lines import CountLine, Line
from benchmarks._steps import per_replica, strategy

ROW = "24"


class Compilations:
    """Counts what XLA compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def new_values(n: int, steps: int) -> list[int]:
    """Traces and compilations of a step on new `PerReplica` objects each time."""
    traces = []

    def step(x: jax.Array) -> jax.Array:
        traces.append(1)
        return jaxdist.get_replica_context().all_reduce("sum", x * 2)

    rng = np.random.default_rng(0)
    inputs = [per_replica(n, rng.normal(size=(2 * n, 3)).astype("float32")) for _ in range(steps)]
    compilations = Compilations()
    for x in inputs:
        strategy_n = _kept_strategy(n)
        strategy_n.run(step, (x,))
    return [len(traces), compilations.count]


_STRATEGIES: dict[int, jaxdist.MirroredStrategy] = {}


def _kept_strategy(n: int) -> jaxdist.MirroredStrategy:
    return _STRATEGIES.setdefault(n, strategy(n))


def carried_state(n: int, steps: int) -> list[int]:
    """Traces and compilations of a loop that carries its state, which starts on the host."""
    chosen = _kept_strategy(n)
    traces = []

    def step(state: Any, x: jax.Array) -> Any:
        traces.append(1)
        change = jaxdist.get_replica_context().all_reduce("mean", x.sum())
        return {"w": state["w"] + change, "steps": state["steps"] + 1}

    state: Any = {"w": np.zeros(3, "float32"), "steps": 0}
    x = per_replica(n, np.ones((2 * n, 3), "float32"))
    compilations = Compilations()
    for _ in range(steps):
        state = chosen.run(step, (state, x))
    jax.block_until_ready(state)
    return [len(traces), compilations.count]


def nnx_model(n: int, steps: int) -> list[int]:
    """Traces and compilations of a loop on an NNX model that starts on one device."""
    chosen = _kept_strategy(n)
    traces = []
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def step(net: nnx.Linear, x: jax.Array) -> jax.Array:
        traces.append(1)
        loss, grads = jaxdist.get_replica_context().all_reduce(
            "mean", nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x))))(net)
        )
        nnx.update(net, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(net, nnx.Param), grads))
        return loss

    x = per_replica(n, np.ones((2 * n, 3), "float32"))
    compilations = Compilations()
    for _ in range(steps):
        jax.block_until_ready(chosen.run(step, (net, x)))
    return [len(traces), compilations.count]


def run(bench: Bench) -> Iterator[Line]:
    """Count."""
    smoke = bench.options.is_smoke
    process = bench.process("0")
    for n in bench.options.sizes(1, 8):
        for title, function, steps in (
            ("new values", new_values, 100),
            ("carried state", carried_state, 1000),
            ("NNX model", nnx_model, 1000),
        ):
            steps = min(steps, 5) if smoke else steps
            bench.options.report(f"row {ROW}: {title}, N={n}")
            traces, compilations = process.call(function, n=n, steps=steps)
            found = f"{traces} + {compilations}"
            size = f"{title}, {steps} steps, N={n}"
            yield CountLine(ROW, size, "traces + compilations", "", found, "1 + 1")
