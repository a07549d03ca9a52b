"""What the processes of a job run for the tests of preemption."""

import pathlib
import time
from typing import Any

import flax.nnx as nnx
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig

Saves = list[tuple[int, float]]


class Model(nnx.Module):
    """A sum over all processes and runs."""

    def __init__(self) -> None:
        self.x = nnx.Param(jnp.zeros(()))


def _save(folder: pathlib.Path, index: int, runs: int, x: float) -> None:
    (folder / f"{index}-{runs}").write_text(repr(x))


def train(
    folder: pathlib.Path,
    runs: int,
    *,
    seconds: float = 0.01,
    grace: float | None = None,
    by_file: bool = False,
    scope: bool = False,
    whole: bool = False,
    exits: bool = True,
) -> dict[str, Any]:
    """Train for a number of runs, and save when the job is told to end.

    With `whole` the handler saves and restores by itself; otherwise each process writes a file.
    """
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    index = strategy.layout.process.index
    model = Model()
    results: dict[str, Any] = {}

    def save() -> None:
        results.setdefault("saves", []).append(handler.total_run_calls)
        print("saved", handler.total_run_calls, flush=True)
        _save(folder, index, handler.total_run_calls, float(model.x[...]))

    config = TerminationConfig(
        (lambda: (folder / f"notice-{index}").exists()) if by_file else None,
        None if exits else (lambda: None),
        grace,
        None if whole else save,
    )
    handler = PreemptionCheckpointHandler(
        strategy.cluster_resolver, model, folder / "checkpoints", config
    )
    ones = strategy.experimental_distribute_values_from_function(
        lambda context: np.full((2,), 1.0, "float32")
    )

    def step(model: Model, x: Any) -> None:
        context = jaxdist.get_replica_context()
        assert context is not None
        model.x[...] = model.x[...] + context.all_reduce("sum", x.sum())

    def run() -> None:
        strategy.run(step, (model, ones))
        time.sleep(seconds)

    results["first"] = handler.total_run_calls

    def loop() -> None:
        while handler.total_run_calls < runs:
            handler.run(run)
            print("run", handler.total_run_calls, flush=True)

    if scope:
        with handler.watch_preemption_scope():
            loop()
            print("last", flush=True)
            wait_for(folder / "go")
    else:
        loop()
    return {**results, "x": float(model.x[...]), "runs": handler.total_run_calls}


def train_without_handler() -> None:
    """Train until a signal comes."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    while True:
        strategy.reduce("sum", strategy.run(lambda: jnp.ones(())), axis=None)
        print("run", flush=True)


def watch(index_of_culprit: int) -> dict[str, Any]:
    """Wait until a process is told to end; the others wait until it has ended."""
    strategy = jaxdist.MultiWorkerMirroredStrategy()
    watcher = PreemptionWatcher()
    index = strategy.layout.process.index
    print("ready", flush=True)
    while watcher.preemption_message is None:
        time.sleep(0.01)
    message = watcher.preemption_message
    print("noticed", flush=True)
    began = time.monotonic()
    if index == index_of_culprit:
        time.sleep(1)
    watcher.block_until_worker_exit()
    return {"message": message, "seconds": time.monotonic() - began}


def wait_for(path: pathlib.Path) -> None:
    """Wait until a file is there."""
    while not path.exists():
        time.sleep(0.01)
