"""Valid calls of datasets and their iterators."""

from typing import Any

import numpy as np

import jaxdist
from jaxdist.data import Batches, OptionalBatch, batches, from_files
from tests.bad_inputs.call import Call, strategy


def _dataset() -> jaxdist.DistributedDataset:
    made: jaxdist.DistributedDataset = strategy().experimental_distribute_dataset(
        batches(np.arange(8), 4)
    )
    return made


def _state() -> Any:
    with iter(_dataset()) as iterator:
        next(iterator)
        return iterator.get_state()


def _iterates(method: str) -> Call:
    def call(**arguments: Any) -> Any:
        with iter(_dataset()) as iterator:
            return getattr(iterator, method)(**arguments)

    return Call(lambda: call)


def _restores(**arguments: Any) -> Any:
    with iter(_dataset()) as iterator:
        iterator.set_state(**arguments)
        return list(iterator)


def _read_file(_: str) -> Any:
    return np.arange(3)


def _batches() -> Batches:
    return batches(np.arange(8), 4)


def _count(total: Any, _: Any) -> Any:
    return total


CALLS = {
    "jaxdist.InputContext": Call(lambda: jaxdist.InputContext, use=str),
    "jaxdist.InputContext.get_per_replica_batch_size": Call(
        lambda: jaxdist.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size,
        lambda: {"global_batch_size": 8},
    ),
    "jaxdist.experimental.ValueContext": Call(lambda: jaxdist.experimental.ValueContext, use=str),
    "jaxdist.InputOptions": Call(
        lambda: jaxdist.InputOptions,
        use=lambda options: list(
            strategy().experimental_distribute_dataset([np.arange(4)], options)
        ),
    ),
    "jaxdist.DistributedDataset.reduce": Call(
        lambda: _dataset().reduce, lambda: {"initial_state": 0, "reduce_func": _count}
    ),
    **{
        f"jaxdist.DistributedIterator.{method}": _iterates(method)
        for method in ("close", "get_next", "get_next_as_optional", "get_state")
    },
    "jaxdist.DistributedIterator.set_state": Call(lambda: _restores, lambda: {"state": _state()}),
    "jaxdist.data.OptionalBatch.get_value": Call(lambda: OptionalBatch((1,)).get_value),
    "jaxdist.data.OptionalBatch.has_value": Call(lambda: OptionalBatch((1,)).has_value),
    "jaxdist.data.batches": Call(
        lambda: batches,
        lambda: {"arrays": np.arange(8), "batch_size": 4, "repeat": 1},
        use=lambda made: [next(iter(made), None) for _ in range(2)],
    ),
    "jaxdist.data.from_files": Call(
        lambda: from_files,
        lambda: {"paths": ["a", "b"], "read": _read_file, "batch_size": 4},
        use=lambda made: [next(iter(made), None) for _ in range(2)],
    ),
}
