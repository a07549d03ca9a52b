"""Steps that are never waited for neither hang nor abort on CPU."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, get_replica_context

START = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, jaxdist, optax
from flax import nnx
from jaxdist import PerReplica, get_replica_context
strategy = jaxdist.MirroredStrategy()
x = jax.device_put(np.ones((16, 32), np.float32), strategy.per_replica_sharding)
"""
FUNCTIONAL = """
w = np.zeros(32, np.float32)
def step(w, x):
    return w + get_replica_context().all_reduce("mean", x.mean(0))
for _ in range(3000):
    w = strategy.run(step, (w, x))
assert float(w[0]) == 3000, w
"""
STATIC = """
w = np.zeros(32, np.float32)
def step(w, x, mode):
    return w + get_replica_context().all_reduce(mode, x.mean(0))
for _ in range(3000):
    w = strategy.run(step, (w, x, "mean"))
assert float(w[0]) == 3000, w
"""
MODEL = """
model = nnx.Linear(32, 1, rngs=nnx.Rngs(0))
def step(model, x):
    model.bias[...] = model.bias[...] + get_replica_context().all_reduce("mean", x.mean())
for _ in range(3000):
    strategy.run(step, (model, x))
assert float(model.bias[0]) == 3000
"""
LOCAL = """
def step(x):
    return x.sum() + get_replica_context().all_gather(x, axis=0).sum()
for _ in range(3000):
    out = strategy.run(step, (x,))
assert float(out.values[0]) == 64 + 512
"""
LOOPS = {"functional": FUNCTIONAL, "static_argument": STATIC, "nnx": MODEL, "not_carried": LOCAL}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(LOOPS))
def test_3000_steps_in_a_tight_loop_finish(name: str) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "NPROC"}
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", START + LOOPS[name] + "print('all done')"],
        cwd=root,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all done" in done.stdout


def _heavy(w: Any, x: Any) -> Any:
    def body(_: Any, c: Any) -> Any:
        return jax.numpy.tanh(c @ c) * 0.1

    local = jax.lax.fori_loop(0, 10, body, w + x)
    return get_replica_context().all_reduce("mean", local)


def test_long_steps_without_waiting_give_the_results_of_waiting() -> None:
    strategy = jaxdist.MirroredStrategy()
    rng = np.random.default_rng(0)
    start = rng.normal(size=(128, 128)).astype(np.float32)
    x = PerReplica([np.full((128, 128), 0.001 * r, np.float32) for r in range(8)])

    def loop(*, wait: bool) -> np.ndarray:
        w: Any = start
        for _ in range(40):
            w = strategy.run(_heavy, (w, x))
            if wait:
                jax.block_until_ready(w)
        return np.asarray(w)

    np.testing.assert_array_equal(loop(wait=False), loop(wait=True))


def test_a_few_steps_are_in_flight_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = jaxdist.MirroredStrategy()
    limit = 8
    start = np.full((256, 256), 0.01, np.float32)
    x = PerReplica([np.full((256, 256), 0.001 * r, np.float32) for r in range(8)])
    w = jax.block_until_ready(strategy.run(_heavy, (start, x)))
    waits: list[Any] = []
    wait, here = jax.block_until_ready, threading.get_ident()

    def count(x: Any) -> Any:
        # Threads of other tests may wait, too.
        if threading.get_ident() == here:
            waits.append(x)
        return wait(x)

    monkeypatch.setattr(jax, "block_until_ready", count)
    results = []
    for _ in range(2 * limit + 1):
        w = strategy.run(_heavy, (w, x))
        results.append(w)
    # Each wait is for the step before it. A step that is read again waits and counts twice.
    assert 2 <= len(waits) < limit
    assert all(w.is_ready() for w in results[:-limit])
