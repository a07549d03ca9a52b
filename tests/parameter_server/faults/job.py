"""The script of all tasks of a short job, in which a test hits one task at one moment.

A task that reaches the moment writes a file, and goes on when the test has written another one.
"""

import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist._parameter_server.protocol import ChangeVariables, GetStatistics, WriteSnapshot
from jaxdist._parameter_server.server import VariableServer
from jaxdist._parameter_server.server.changing import StagedRequest
from jaxdist._parameter_server.server.snapshots import SnapshotKeeper
from jaxdist._parameter_server.strategy.links import RemoteWorkerLink
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist._parameter_server.worker.worker import Worker
from jaxdist.cluster_resolver import TFConfigClusterResolver
from jaxdist.coordinator import ClusterCoordinator
from jaxdist.errors import JaxdistError
from jaxdist.training import Checkpoints

# Pytest imports the file to look for doctests, without these variables.
FOLDER = pathlib.Path(os.environ.get("FAULT_FOLDER", "."))
WHO, MOMENT = os.environ.get("FAULT_WHO", ""), os.environ.get("FAULT_MOMENT", "")
SNAPSHOT_SECONDS = float(os.environ.get("FAULT_SNAPSHOT_SECONDS", "0.2"))
START = int(os.environ.get("JAXDIST_ATTEMPT", "1"))
STEPS = 20


def write(name: str, **content: Any) -> None:
    """Write a file, whole."""
    part = FOLDER / f"{name}.part"
    part.write_text(json.dumps(content))
    part.rename(FOLDER / name)


def wait_for(name: str) -> None:
    """Wait until the test has written a file."""
    while not (FOLDER / name).exists():
        time.sleep(0.005)


class Moment:
    """A moment of this task; the test hits it at the n-th time."""

    def __init__(self, who: str, moment: str, times: int = 1, start: int = 1) -> None:
        self._is_meant = (who, moment) == (WHO, MOMENT) and start == START
        self._times = times

    def reach(self) -> None:
        """Let the test hit this task, if it is time."""
        if not self._is_meant:
            return
        self._times -= 1
        if self._times == 0:
            write("reached", pid=os.getpid())
            wait_for("go")


def insert(
    owner: Any, name: str, moment: Moment, *, after: bool, kind: type[Any] | None = None
) -> None:
    """Let a method reach a moment before it runs, or after; with `kind`, for such requests."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_meant = kind is None or isinstance(args[-1], kind)
        if is_meant and not after:
            moment.reach()
        found = method(*args, **kwargs)
        if is_meant and after:
            moment.reach()
        return found

    setattr(owner, name, call)


def run_server(resolver: TFConfigClusterResolver, name: str) -> None:
    """Be a parameter server or a worker."""
    if resolver.task_type == "worker":
        compile_programs = Worker._compile_each

        def compile_and_wrap(self: Worker, loaded: Any) -> list[Any]:
            programs = compile_programs(self, loaded)
            return [_wrap(programs[0], computing), *programs[1:]]

        computing = Moment(name, "computing", times=2)
        setattr(Worker, "_compile_each", compile_and_wrap)  # noqa: B010
        # The server has applied the changes, and nobody has told the chief.
        moment = Moment(name, "exchange", times=2)
        insert(RemoteServer, "call", moment, after=True, kind=ChangeVariables)
        Moment(name, "restarting", start=2).reach()
    else:
        insert(StagedRequest, "commit", Moment(name, "computing", times=5), after=False)
        # Applied, and the worker has no reply.
        moment = Moment(name, "exchange", times=5)
        insert(VariableServer, "call", moment, after=True, kind=ChangeVariables)
        # Some of the files are written. The first snapshot is complete.
        snapshot = Moment(name, "snapshot", times=2)
        insert(Checkpoints, "wait_until_finished", snapshot, after=False)
        insert(SnapshotKeeper, "load", Moment(name, "restarting", start=2), after=False)
    server = jaxdist.Server(
        resolver.cluster_spec(),
        resolver.task_type,
        resolver.task_id,
        snapshot_seconds=SNAPSHOT_SECONDS,
    )
    server.join()


def _wrap(program: Callable[..., Any], moment: Moment) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        moment.reach()
        return program(*args)

    return run


def dataset_fn() -> Any:
    """Return batches without end."""
    while True:
        yield np.ones(3, np.float32)


def train(resolver: TFConfigClusterResolver) -> dict[str, Any]:
    """Train, and return what was counted."""
    # A worker has run the closure, and the chief has not counted it.
    exchange = Moment("chief 0", "exchange", times=5)
    insert(RemoteWorkerLink, "_exchange", exchange, after=True)
    # No snapshot has the new variables.
    moment = Moment("chief 0", "snapshot")
    insert(RemoteServer, "call", moment, after=False, kind=WriteSnapshot)
    computing = Moment("chief 0", "computing")
    Moment("chief 0", "restarting", start=2).reach()
    strategy = jaxdist.ParameterServerStrategy(resolver)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        w = jaxdist.Variable(jnp.zeros(3), name="w")
        count = jaxdist.Variable(0, name="count")
    before = int(count)

    def step(batches: Any) -> Any:
        batch = next(batches)
        w.assign_add(batch)
        count.assign_add(1)
        return batch.sum()

    def trace_slowly(batches: Any) -> Any:
        computing.reach()
        return step(batches)

    batches = iter(coordinator.create_per_worker_dataset(dataset_fn))
    coordinator.schedule(step, (batches,)).fetch()
    write("idle", pid=os.getpid())
    wait_for("go on")
    # Both workers come to it, whichever of them is faster.
    while not (FOLDER / "reached").exists() and MOMENT != "idle":
        for _ in range(10):
            coordinator.schedule(step, (batches,))
        if WHO == "chief 0":
            coordinator.schedule(trace_slowly, (batches,))
        coordinator.join()
    for _ in range(STEPS):
        coordinator.schedule(step, (batches,))
    coordinator.join()
    found = coordinator.statistics()
    total = float(w.numpy()[0])
    return {
        "before": before,
        "count": int(count),
        "total": total,
        "scheduled": found.scheduled,
        "applied": found.applied,
        "lost": found.lost,
        "retried": found.retried,
        "requests": strategy.storage.links[0].call(GetStatistics()).applied,
    }


def main() -> None:
    """Run one task."""
    resolver = TFConfigClusterResolver()
    assert resolver.task_type is not None
    assert resolver.task_id is not None
    name = f"{resolver.task_type} {resolver.task_id}"
    address = resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    write(f"pid {name} {START}", pid=os.getpid(), address=address)
    if resolver.task_type != "chief":
        run_server(resolver, name)
        return
    try:
        found = train(resolver)
    except JaxdistError as error:
        write("result", error=type(error).__name__, text=str(error), time=time.time())
        raise
    write("result", error=None, **found)


if __name__ == "__main__":
    main()
