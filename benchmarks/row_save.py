"""Saving a checkpoint keeps the training loop a short time.

Claim: `Checkpoints.save` of 64 MB, half of it sharded over the replicas, takes at most half of the
time until the checkpoint is on disk.
"""

import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks._bench import Bench, arm
from benchmarks._lines import Line, Need
from benchmarks._loop import Loop
from benchmarks._steps import strategy
from jaxdist.training import Checkpoints

ROW = "save"

# Of all arms of the process: none is timed while another one writes.
_OPEN: list[Checkpoints] = []
# They are deleted with the process.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def save(n: int, size: int, wait: bool) -> Loop:
    """Saves of one state, each with or without waiting for it."""
    chosen = strategy(n)
    values = np.random.default_rng(0).normal(size=size // 8).astype("float32")
    state = {
        "sharded": jax.device_put(values, chosen.per_replica_sharding),
        "whole": jax.device_put(values, chosen.replicated_sharding),
    }
    _FOLDERS.append(tempfile.TemporaryDirectory())
    checkpoints = Checkpoints(_FOLDERS[-1].name, keep=1)
    _OPEN.append(checkpoints)
    step = 0

    def prepare(_: int) -> None:
        for each in _OPEN:
            each.wait_until_finished()

    def loop(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            step += 1
            checkpoints.save(step, state)
            if wait:
                checkpoints.wait_until_finished()

    return Loop(loop, prepare)


def run(bench: Bench) -> Iterator[Line]:
    """Compare."""
    options = bench.options
    size = 1 << (16 if options.is_smoke else 26)
    for n in options.sizes(8, full=(1, 8)):
        arms = {
            "save": arm(save, n=n, size=size, wait=False),
            "save, then wait": arm(save, n=n, size=size, wait=True),
        }
        race = bench.race(f"{size >> 20} MB, N={n}", arms, 1, in_one_process=True)
        yield race.line("save", "save, then wait", Need(0.5))
