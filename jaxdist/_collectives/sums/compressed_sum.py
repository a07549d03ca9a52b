"""A sum in two levels, of which the slow one carries fewer bits."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms import ReplicaGroups, Xla, split, whole
from jaxdist._collectives.algorithms.algorithm import padded
from jaxdist._collectives.marks.replicated import assume_replicated
from jaxdist._collectives.sums.compression import Compression
from jaxdist._mesh import ReplicaMesh


class Errors(NamedTuple):
    """What was lost so far on this replica, to be sent the next time.

    `given` is of what the replica sent to the workers that sum, `summed` of what it sent back to
    all workers.
    """

    given: jax.Array
    summed: jax.Array


@dataclasses.dataclass(frozen=True)
class CompressedSum:
    """Sums a float32 vector `[size]` over all replicas; across workers in `compression`.

    Within a worker a reduce-scatter and an all-gather of float32. Across workers, every worker
    sums a chunk of the part (an all-to-all of codes), and hands it to the others (an all-gather
    of codes), so that `2 (W-1)/W` of the part's codes leave each device. What rounding takes
    away is kept, and added to what is sent the next time.

    Source:
        Seide et al., "1-bit stochastic gradient descent", 2014; the two errors are those of Tang
        et al., "1-bit Adam", 2021.
    """

    compression: Compression
    layout: ReplicaMesh
    local: int  # replicas of a worker

    @property
    def workers(self) -> int:
        """Workers that exchange codes."""
        return self.layout.num_replicas // self.local

    def part(self, size: int) -> int:
        """Elements that a replica exchanges with other workers, with padding."""
        multiple = self.workers * self.compression.multiple
        return math.ceil(math.ceil(size / self.local) / multiple) * multiple

    def no_errors(self, size: int) -> Errors:
        """Errors before the first sum."""
        part = self.part(size)
        return Errors(jnp.zeros(part), jnp.zeros(part // self.workers))

    def __call__(self, vector: jax.Array, errors: Errors) -> tuple[jax.Array, Errors]:
        """The sum, the same on all replicas, and the errors that it leaves on this one."""
        within, across = split(whole(self.layout), self.local)
        part = self._reduced(vector, within)
        if self.workers > 1:
            part, errors = self._exchanged(part, errors, across)
        total = part if self.local == 1 else Xla().all_gather(part, within)
        return assume_replicated(total[: vector.size]), errors

    def _reduced(self, vector: jax.Array, within: ReplicaGroups) -> jax.Array:
        whole_size = self.part(vector.size) * self.local
        even = padded(vector, whole_size) if vector.size else jnp.zeros(whole_size)
        return even if self.local == 1 else Xla().reduce_scatter(even, within)

    def _exchanged(
        self, part: jax.Array, errors: Errors, across: ReplicaGroups
    ) -> tuple[jax.Array, Errors]:
        encode, decode = self.compression.encoded, self.compression.decoded
        wanted = (part + errors.given).reshape(self.workers, -1)
        code = encode(wanted)
        theirs = jax.lax.all_to_all(
            code, across.name, 0, 0, axis_index_groups=across.index_groups, tiled=True
        )
        summed = jnp.sum(decode(theirs), axis=0) + errors.summed
        own = encode(summed[None])
        everyones = Xla().all_gather(own.ravel(), across).reshape(self.workers, -1)
        left = Errors(_finite(wanted - decode(code)).ravel(), _finite(summed - decode(own)[0]))
        return decode(everyones).ravel(), left


def _finite(errors: jax.Array) -> jax.Array:
    """Errors to send later; of a number that is not finite there is nothing to make up for."""
    return jnp.where(jnp.isfinite(errors), errors, 0.0)
