"""The arms of the rows on parameter servers in `tf.distribute`, without JAX.

`python -m benchmarks._tensorflow_servers` is one task of the cluster that TF_CONFIG describes.
"""

import importlib
import json
import os
import socket
from typing import Any

from benchmarks._children import Child
from benchmarks._loop import Loop
from benchmarks._server_job import LENGTH, MANY, RATE, WORKERS, make_batch, make_parameters


def train(batch: int, layer: str) -> Loop:
    """One server and two workers; the variables are changed by `assign_sub`."""
    tf, strategy, coordinator = _make_coordinator(layer, WORKERS)
    with strategy.scope():
        variables = [tf.Variable(x) for x in make_parameters()]

    def make_dataset() -> Any:
        return tf.data.Dataset.from_tensors(make_batch(batch)).repeat()

    @tf.function
    def step(iterator: Any) -> Any:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            x = images
            for n in range(0, len(variables), 2):
                x = x @ variables[n] + variables[n + 1]
                x = tf.nn.relu(x) if n < len(variables) - 2 else x
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, variables)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(RATE * grad)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
    first = float(coordinator.schedule(step, args=(iterator,)).fetch())
    last: list[Any] = []

    def run(steps: int) -> None:
        for _ in range(steps):
            last[:] = [coordinator.schedule(step, args=(iterator,))]
        coordinator.join()

    return Loop(run, facts=lambda: {"has learned": float(last[0].fetch()) < first})


def move_many(layer: str) -> Loop:
    """One worker reads and changes a hundred variables."""
    tf, strategy, coordinator = _make_coordinator(layer, 1)
    with strategy.scope():
        variables = [tf.Variable(tf.ones(LENGTH)) for _ in range(MANY)]

    @tf.function
    def step() -> None:
        for variable in variables:
            variable.assign_sub(0.01 * variable)

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    return Loop(run)


def schedule_nothing(layer: str, joins: bool = False) -> Loop:
    """Calls of `schedule` with an empty function; `joins` waits for their results, too."""
    tf, _, coordinator = _make_coordinator(layer, WORKERS)

    @tf.function
    def do_nothing() -> None:
        return None

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(do_nothing)
        if joins:
            coordinator.join()

    def prepare(_: int) -> None:
        coordinator.join()

    return Loop(run, prepare=prepare)


# A process has one cluster.
_MADE: list[tuple[Any, Any, Any]] = []
_TASKS: list[Any] = []


def _make_coordinator(layer: str, workers: int) -> tuple[Any, Any, Any]:
    tf = importlib.import_module("tensorflow")
    if not _MADE:
        spec = {"ps": [_find_address()], "worker": [_find_address() for _ in range(workers)]}
        tasks = [(job, index) for job, own in spec.items() for index in range(len(own))]
        for job, index in tasks:
            config = json.dumps({"cluster": spec, "task": {"type": job, "index": index}})
            if layer == "grpc":
                Child(["-m", __name__], {**os.environ, "TF_CONFIG": config})
            else:
                _TASKS.append(_serve(spec, job, index))
        whole = tf.train.ClusterSpec({**spec, "chief": [_find_address()]})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(whole, rpc_layer="grpc")
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        _MADE.append((tf, strategy, coordinator))
    return _MADE[0]


def _serve(spec: dict[str, list[str]], job: str, index: int) -> Any:
    tf = importlib.import_module("tensorflow")
    config = tf.compat.v1.ConfigProto()
    # With as many threads as this machine has cores, a server waits for itself for ever.
    config.inter_op_parallelism_threads = WORKERS + 2
    cluster = tf.train.ClusterSpec(spec)
    return tf.distribute.Server(cluster, job, index, protocol="grpc", config=config)


def _find_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def main() -> None:
    """Be one task."""
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    _serve(config["cluster"], task["type"], task["index"]).join()


if __name__ == "__main__":
    main()
