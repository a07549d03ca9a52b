"""Valid calls of central storage, partitioners and lookups."""

from typing import Any

import jax.numpy as jnp

import jaxdist
from jaxdist.experimental import partitioners
from tests.bad_inputs.call import Call, variable

_SHAPE = {"shape": (10, 4), "dtype": "float32", "axis": 0}


def _of_shape(partitioner: Any) -> Call:
    return Call(lambda: partitioner, lambda: dict(_SHAPE))


_MODULE = "jaxdist.experimental.partitioners"
CALLS = {
    "jaxdist.experimental.CentralStorageStrategy": Call(
        lambda: jaxdist.experimental.CentralStorageStrategy,
        lambda: {"compute_devices": ["cpu:0", "cpu:1"], "parameter_device": "cpu:2"},
    ),
    "jaxdist.compat.v1.experimental.CentralStorageStrategy": Call(
        lambda: jaxdist.compat.v1.experimental.CentralStorageStrategy,
        lambda: {"compute_devices": ["cpu:0", "cpu:1"], "parameter_device": "cpu:2"},
    ),
    "jaxdist.nn.embedding_lookup": Call(
        lambda: jaxdist.nn.embedding_lookup,
        lambda: {"table": variable(), "ids": jnp.array([2, 0])},
    ),
    f"{_MODULE}.Partitioner": Call(lambda: partitioners.Partitioner),
    f"{_MODULE}.FixedShardsPartitioner": Call(
        lambda: partitioners.FixedShardsPartitioner, lambda: {"num_shards": 2}
    ),
    f"{_MODULE}.FixedShardsPartitioner.__call__": _of_shape(partitioners.FixedShardsPartitioner(2)),
    f"{_MODULE}.MinSizePartitioner": Call(
        lambda: partitioners.MinSizePartitioner,
        lambda: {"min_shard_bytes": 8, "max_shards": 2, "bytes_per_string": 16},
    ),
    f"{_MODULE}.MinSizePartitioner.__call__": _of_shape(partitioners.MinSizePartitioner(8, 2)),
    f"{_MODULE}.MaxSizePartitioner": Call(
        lambda: partitioners.MaxSizePartitioner,
        lambda: {"max_shard_bytes": 8, "max_shards": 2, "bytes_per_string": 16},
    ),
    f"{_MODULE}.MaxSizePartitioner.__call__": _of_shape(partitioners.MaxSizePartitioner(8)),
}
