"""A sum in two levels, with compressed numbers on the slow level."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist._collectives.algorithms import ReplicaGroups, Xla, group_all, split
from jaxdist._collectives.algorithms.algorithm import pad_to_multiple
from jaxdist._collectives.marks.replicated import assume_replicated
from jaxdist._collectives.sums.compression import Compression
from jaxdist._mesh import ReplicaMesh


class RoundingErrors(NamedTuple):
    """The rounding errors of this replica so far, which the next sum adds.

    `given` is the error of what the replica sent to the workers that sum. `summed` is the error of
    the sum that it sent back to all workers.
    """

    given: jax.Array
    summed: jax.Array


@dataclasses.dataclass(frozen=True)
class CompressedSum:
    """Sum of a float32 vector `[size]` over all replicas, compressed between workers.

    Within a worker, a reduce-scatter and an all-gather of float32 run. Between workers, every
    worker sums one chunk of the part (an all-to-all of codes) and sends the sum to the others (an
    all-gather of codes). So `2 (W-1)/W` of the part's codes leave each device. The rounding errors
    are stored, and the next sum adds them.

    Source:
        Seide et al., "1-bit stochastic gradient descent", 2014; the two errors are those of Tang
        et al., "1-bit Adam", 2021.
    """

    compression: Compression
    layout: ReplicaMesh
    local: int  # replicas of a worker

    @property
    def workers(self) -> int:
        """The number of workers that exchange codes."""
        return self.layout.num_replicas // self.local

    def part(self, size: int) -> int:
        """Return how many elements a replica exchanges with other workers, with padding."""
        multiple = self.workers * self.compression.multiple
        return math.ceil(math.ceil(size / self.local) / multiple) * multiple

    def no_errors(self, size: int) -> RoundingErrors:
        """Return the errors before the first sum, which are zero."""
        part = self.part(size)
        return RoundingErrors(jnp.zeros(part), jnp.zeros(part // self.workers))

    def __call__(
        self, vector: jax.Array, errors: RoundingErrors
    ) -> tuple[jax.Array, RoundingErrors]:
        """Return the sum, equal on all replicas, and the errors of this replica."""
        within, across = split(group_all(self.layout), self.local)
        part = self._reduce_scatter(vector, within)
        if self.workers > 1:
            part, errors = self._exchange(part, errors, across)
        total = part if self.local == 1 else Xla().all_gather(part, within)
        # Every replica decodes the same codes, so the bits are equal. The analysis cannot see that,
        # since the codes come from an all-gather over groups.
        return assume_replicated(total[: vector.size]), errors

    def _reduce_scatter(self, vector: jax.Array, within: ReplicaGroups) -> jax.Array:
        """Return the sum within the worker of this replica's part."""
        whole_size = self.part(vector.size) * self.local
        # A vector without elements stays without elements when it is padded to a multiple.
        even = pad_to_multiple(vector, whole_size) if vector.size else jnp.zeros(whole_size)
        return even if self.local == 1 else Xla().reduce_scatter(even, within)

    def _exchange(
        self, part: jax.Array, errors: RoundingErrors, across: ReplicaGroups
    ) -> tuple[jax.Array, RoundingErrors]:
        """Return the sum over the workers of one part, and the rounding errors."""
        encode, decode = self.compression.encode, self.compression.decode
        # Error feedback: the error of the last sum is added before rounding, so that it is sent
        # late and not lost.
        wanted = (part + errors.given).reshape(self.workers, -1)
        code = encode(wanted)
        summed = jnp.sum(decode(across.all_to_all(code)), axis=0) + errors.summed
        # The sum is coded a second time, which makes a second error on the worker that sums.
        own = encode(summed[None])
        everyones = Xla().all_gather(own.ravel(), across).reshape(self.workers, -1)
        left = RoundingErrors(
            _finite(wanted - decode(code)).ravel(), _finite(summed - decode(own)[0])
        )
        return decode(everyones).ravel(), left


def _finite(errors: jax.Array) -> jax.Array:
    """Return errors that the next sum can add: 0 where the number was not finite."""
    return jnp.where(jnp.isfinite(errors), errors, 0.0)
