"""Arms of the rows on parameter servers: workers with a server, workers alone, and the queue.

With `layer="local"` servers and workers are in this process, with "grpc" each is one of its own.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from benchmarks import _server_job
from benchmarks._children import Child
from benchmarks._loop import Loop
from benchmarks._raw_tasks import find_loss
from benchmarks._server_job import LENGTH, MANY, RATE, WORKERS, make_batch, make_parameters
from jaxdist._launching import find_free_ports
from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver


def train_with_a_server(batch: int, layer: str = "local") -> Loop:
    """Closures on two workers, each of which changes the 10 variables of one server."""
    return train(make_strategy(layer), batch)


def train(strategy: ParameterServerStrategy, batch: int) -> Loop:
    """Train the net on a cluster that is there."""
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [jaxdist.Variable(x) for x in make_parameters()]
    batches = coordinator.create_per_worker_dataset(_server_job.BATCHES[batch])

    def step(iterator: Any) -> Any:
        own = [v.value() for v in variables]
        loss, grads = jax.value_and_grad(find_loss)(own, *next(iterator))
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(RATE * grad, read_value=False)
        return loss

    iterator = iter(batches)
    first = float(coordinator.schedule(step, (iterator,)).fetch())
    last: list[Any] = []

    def loop(steps: int) -> None:
        last[:] = [coordinator.schedule(step, (iterator,)) for _ in range(steps)]
        coordinator.join()

    def facts() -> dict[str, Any]:
        counts = coordinator.statistics()
        has_learned = float(last[-1].fetch()) < first
        return {"has all": counts.applied == counts.scheduled, "has learned": has_learned}

    return Loop(loop, facts=facts)


def move_many(layer: str) -> Loop:
    """Closures on one worker, each of which reads and changes a hundred variables."""
    strategy = make_strategy(layer, workers=1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [jaxdist.Variable(np.ones(LENGTH, "float32")) for _ in range(MANY)]

    def step() -> None:
        for variable in variables:
            variable.assign_sub(0.01 * variable.value(), read_value=False)

    def loop(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    def facts() -> dict[str, Any]:
        counts = coordinator.statistics()
        power = 0.99**counts.applied
        values = [v.value() for v in variables]
        is_right = all(np.allclose(v, power, rtol=1e-3, atol=1e-30) for v in values)
        return {"has all": counts.applied == counts.scheduled and is_right}

    return Loop(loop, facts=facts)


def compute_in_threads(batch: int) -> Loop:
    """The same gradients in as many threads, which exchange nothing."""
    images, labels = make_batch(batch)
    parameters = [jnp.asarray(x) for x in make_parameters()]
    find = jax.jit(jax.value_and_grad(find_loss))
    threads = ThreadPoolExecutor(WORKERS)

    def work(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(find(parameters, images, labels))

    def loop(steps: int) -> None:
        shares = [steps // WORKERS + (n < steps % WORKERS) for n in range(WORKERS)]
        list(threads.map(work, shares))

    return Loop(loop)


def schedule_nothing(layer: str = "local", joins: bool = False) -> Loop:
    """Calls of `schedule` with an empty function; `joins` waits for their results, too."""
    coordinator = ClusterCoordinator(make_strategy(layer))

    def loop(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(_do_nothing)
        if joins:
            coordinator.join()

    def prepare(_: int) -> None:
        coordinator.join()

    return Loop(loop, prepare=prepare)


def submit_nothing() -> Loop:
    """Calls of `submit` of a thread pool with an empty function."""
    threads = ThreadPoolExecutor(WORKERS)
    waiting: list[Any] = []

    def loop(steps: int) -> None:
        waiting.extend(threads.submit(_do_nothing) for _ in range(steps))

    def wait(_: int) -> None:
        for future in waiting:
            future.result()
        waiting.clear()

    return Loop(loop, prepare=wait)


def _do_nothing() -> None:
    return None


def make_strategy(layer: str, workers: int = WORKERS) -> ParameterServerStrategy:
    """Return a strategy with one server; with "grpc" its tasks are started, each in a process."""
    jobs = {"ps": 1, "worker": workers, "chief": 1}
    ports = iter(find_free_ports(sum(jobs.values())))
    spec = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
    if layer == "grpc":
        _start_tasks(spec)
    cluster = ClusterSpec(spec)
    resolver = SimpleClusterResolver(cluster, task_type="chief", task_id=0, rpc_layer=layer)
    return ParameterServerStrategy(resolver)


def _start_tasks(spec: dict[str, list[str]]) -> None:
    for job in ("ps", "worker"):
        for index in range(len(spec[job])):
            config = {"cluster": spec, "task": {"type": job, "index": index}}
            environ = {**os.environ, "TF_CONFIG": json.dumps(config)}
            command = ["-m", "jaxdist", "server", "--module", _server_job.__name__]
            Child(command, environ)
