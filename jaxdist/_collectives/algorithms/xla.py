"""XLA's own collectives as an algorithm."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms.algorithm import Scattering, pad_to_multiple
from jaxdist._collectives.algorithms.replica_groups import ReplicaGroups


@dataclasses.dataclass(frozen=True)
class Xla(Scattering):
    """One all-reduce, reduce-scatter or all-gather of XLA; the backend chooses how it runs.

    Cost:
        At best `2 (n-1)/n` of the bytes in and out of each device.

    Source:
        `nccl` in `tf.contrib.distribute.MultiWorkerAllReduce`.
    """

    # In reports. Specs call it `nccl`, but it is NCCL only on GPUs.
    name = "xla"

    def all_reduce(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return the sum by one `psum`."""
        return jax.lax.psum(
            hide_complex_constant(vector), level.name, axis_index_groups=level.index_groups
        )

    def reduce_scatter(self, vector: jax.Array, level: ReplicaGroups) -> jax.Array:
        """Return this replica's part of the sum by one `psum_scatter`."""
        return jax.lax.psum_scatter(
            hide_complex_constant(pad_to_multiple(vector, level.size)),
            level.name,
            axis_index_groups=level.index_groups,
            tiled=True,
        )


def hide_complex_constant(array: jax.Array) -> jax.Array:
    """Hide a complex array from XLA, which aborts the process if it sums a complex constant."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return jax.lax.optimization_barrier(array) if is_complex else array
