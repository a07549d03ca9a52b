"""The arms in `tf.distribute`; they run in an environment that has no JAX.

TensorFlow is imported inside, since the driver imports this file to name its functions.
"""

import importlib
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


def _ones(tf: Any, strategy: Any, shape: tuple[int, ...]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda _: tf.ones(shape, tf.float32)
    )


def _wait(strategy: Any, result: Any) -> None:
    for value in strategy.experimental_local_results(result):
        value.numpy()
