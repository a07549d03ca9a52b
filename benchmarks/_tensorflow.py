"""The arms in `tf.distribute`; they run in an environment that has no JAX.

TensorFlow is imported inside, since the driver imports this file to name its functions.
"""

import importlib
import json
import os
from typing import Any

from benchmarks._host_batch import checksum, mlp_batch
from benchmarks._loop import Loop


def _strategy(n: int) -> tuple[Any, Any]:
    tf = importlib.import_module("tensorflow")
    devices = tf.config.list_logical_devices("CPU") if _STARTED else _logical_devices(tf)
    _STARTED.append(True)
    return tf, tf.distribute.MirroredStrategy([d.name for d in devices[:n]])


_STARTED: list[bool] = []


def _logical_devices(tf: Any) -> Any:
    one = tf.config.list_physical_devices("CPU")[0]
    eight = [tf.config.LogicalDeviceConfiguration() for _ in range(8)]
    tf.config.set_logical_device_configuration(one, eight)
    return tf.config.list_logical_devices("CPU")


def run_plus_one(n: int) -> Loop:
    """`tf.function` of `strategy.run(x + 1)`."""
    tf, strategy = _strategy(n)

    @tf.function
    def step(x: Any) -> Any:
        return strategy.run(lambda v: v + 1.0, (x,))

    x = _ones(tf, strategy, ())

    def run(steps: int) -> None:
        result = x
        for _ in range(steps):
            result = step(x)
        _wait(strategy, result)

    return Loop(run)


def reduce_sum(n: int) -> Loop:
    """Eager `strategy.reduce(SUM, scalar)`, taken to a float."""
    tf, strategy = _strategy(n)
    x = _ones(tf, strategy, ())

    def run(steps: int) -> None:
        for _ in range(steps):
            float(strategy.reduce("SUM", x, axis=None))

    return Loop(run)


def gather(n: int) -> Loop:
    """Eager `strategy.gather` of (2, 4) per replica."""
    tf, strategy = _strategy(n)
    x = _ones(tf, strategy, (2, 4))

    def run(steps: int) -> None:
        for _ in range(steps):
            strategy.gather(x, axis=0)

    return Loop(run)


def next_batch(n: int) -> Loop:
    """`next` of a distributed dataset of one batch for ever, with default options."""
    tf, strategy = _strategy(n)
    # One tensor for each array, so that the source itself costs next to nothing.
    dataset = tf.data.Dataset.from_tensors(mlp_batch()).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    last: list[Any] = []

    def run(steps: int) -> None:
        batch = None
        for _ in range(steps):
            # Eager: the tensors are there when it returns.
            batch = next(batches)
        last[:] = [batch]

    def found() -> dict[str, Any]:
        (batch,) = last
        pieces = [v.numpy() for x in batch for v in strategy.experimental_local_results(x)]
        return {"bytes": checksum(pieces)}

    return Loop(run, facts=found)


def workers_all_reduce(
    rank: int, ports: list[int], shapes: list[list[int]], ring: bool = False
) -> Loop:
    """`all_reduce` in a `tf.function` of `MultiWorkerMirroredStrategy.run`, one device each."""
    tf = importlib.import_module("tensorflow")
    if not _WORKERS:
        workers = [f"localhost:{p}" for p in ports]
        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        )
        how = tf.distribute.experimental.CommunicationImplementation
        _WORKERS.append(
            tf.distribute.MultiWorkerMirroredStrategy(
                communication_options=tf.distribute.experimental.CommunicationOptions(
                    implementation=how.RING if ring else how.AUTO
                )
            )
        )
    (strategy,) = _WORKERS
    given = [tf.fill(shape, float(i + rank + 1)) for i, shape in enumerate(shapes)]

    @tf.function
    def step(values: Any) -> Any:
        def on_replica(local: Any) -> Any:
            # What no operation of the replica has made is refused: "destinations can not be empty".
            made = [tf.identity(x) for x in local]
            return tf.distribute.get_replica_context().all_reduce("SUM", made)

        return strategy.run(on_replica, (values,))

    last: list[Any] = [step(given)]

    def run(steps: int) -> None:
        for _ in range(steps):
            last[0] = step(given)
            for value in last[0]:
                # Eager: NumPy takes the memory over, when it is there.
                _wait(strategy, value)

    def facts() -> dict[str, Any]:
        local = [strategy.experimental_local_results(x)[0] for x in last[0]]
        return {"sum": sum(float(x.numpy().ravel()[0]) for x in local)}

    return Loop(run, facts=facts)


# One strategy for a process: the servers of a second one would not find free ports.
_WORKERS: list[Any] = []


def _ones(tf: Any, strategy: Any, shape: tuple[int, ...]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda _: tf.ones(shape, tf.float32)
    )


def _wait(strategy: Any, result: Any) -> None:
    for value in strategy.experimental_local_results(result):
        value.numpy()
