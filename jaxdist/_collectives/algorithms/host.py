"""The all-reduce on the hosts of the devices."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._collectives.algorithms.algorithm import Scattering, exchange_parts
from jaxdist._collectives.algorithms.one_device import OneDevice
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class Host(Scattering):
    """The host of every accelerator sums the vectors of the group.

    On CPU devices, the host is the device. The reduction is then that of `OneDevice`.

    Cost:
        On accelerators an all-gather, `n-1` times the bytes into each device, and `n` times the
        bytes between device and host. On CPU the cost of `OneDevice`.

    Args:
        platform: `'cpu'`, `'gpu'` or `'tpu'`.

    Source:
        `pscpu` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    platform: str

    name = "pscpu"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the same sum, in the same order, computed by the host of every device."""
        if self.platform == "cpu":
            return OneDevice().all_reduce(vector, level)
        rows = self.all_gather(vector, level).reshape(level.size, -1)
        return _compat.compute_on_host(_sum_rows, rows)

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this device's part of the sum, computed by its host, after an all-to-all."""
        if self.platform == "cpu":
            return OneDevice().reduce_scatter(vector, level)
        return _compat.compute_on_host(_sum_rows, exchange_parts(vector, level))


def _sum_rows(rows: jax.Array) -> jax.Array:
    """Return the sum of rows in their own dtype."""
    # `jnp.sum` would widen small integers.
    return jnp.sum(rows, axis=0, dtype=rows.dtype)
