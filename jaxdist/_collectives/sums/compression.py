"""Compressed gradients, and their sum."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist._called import refuse
from jaxdist._collectives.algorithms.algorithm import (
    ReplicaGroups,
    group_all,
    pad_to_multiple,
    split,
)
from jaxdist._collectives.algorithms.one_level import Xla
from jaxdist._collectives.marks import assume_replicated
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import respell, show

# Numbers that share one scale. The scale takes 4 bytes, 1.6 % of the bytes of the codes.
BLOCK = 256


class Compression(abc.ABC):
    """A code for float32 vectors that takes fewer bytes. Each row of a matrix has its own code."""

    multiple: int

    @abc.abstractmethod
    def encode(self, rows: jax.Array) -> jax.Array:
        """Return the code of `[n, size]` as `[n, bytes or halves]`; `multiple` divides `size`."""

    @abc.abstractmethod
    def decode(self, code: jax.Array) -> jax.Array:
        """Return the float32 numbers of a code, `[n, size]`."""


@dataclasses.dataclass(frozen=True)
class HalfPrecision(Compression):
    """bfloat16: half of the bytes, 8 bits of precision."""

    multiple = 1

    def encode(self, rows: jax.Array) -> jax.Array:
        """Return the nearest bfloat16 numbers, as integers."""
        # As integers: a backend may run collectives of bfloat16 in float32, with twice the bytes.
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, code: jax.Array) -> jax.Array:
        """Return the bfloat16 numbers as float32, without rounding."""
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Int8(Compression):
    """One byte for each number and a scale for each 256: about a quarter of the bytes."""

    multiple = BLOCK

    def encode(self, rows: jax.Array) -> jax.Array:
        """Return each block in steps of 1/127 of its largest number, with the scales at the end."""
        count = rows.shape[0]
        blocks = rows.reshape(count, -1, BLOCK)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        # If a number of a block is not finite, the whole block decodes to nan. So checks of
        # gradients still find such numbers. `largest` cannot be used for this test: XLA's maximum
        # on CPU ignores nan.
        finite = jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True)
        # A block of zeros would otherwise divide zero by zero.
        scale = jnp.where(finite, jnp.where(largest == 0, 1.0, largest / 127), jnp.nan)
        steps = jnp.where(finite, jnp.round(blocks / scale), 1.0)
        numbers = steps.astype(jnp.int8).reshape(count, -1)
        # As int8 bytes, the scales travel in the same collective as the numbers.
        scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8).reshape(count, -1)
        return jnp.concatenate([numbers, scales], axis=1)

    def decode(self, code: jax.Array) -> jax.Array:
        """Return the numbers times their scales."""
        count, width = code.shape
        size = width // (BLOCK + 4) * BLOCK
        numbers = code[:, :size].reshape(count, -1, BLOCK).astype(jnp.float32)
        scales = code[:, size:].reshape(count, -1, 4)
        scale = jax.lax.bitcast_convert_type(scales, jnp.float32)
        return (numbers * scale[..., None]).reshape(count, size)


_BY_NAME: dict[str, Compression] = {"bf16": HalfPrecision(), "int8": Int8()}


def find_compression(name: Any) -> Compression:
    """Return the compression with a name, or raise an error that lists the names."""
    found = respell(name, _BY_NAME)
    if isinstance(found, str) and found in _BY_NAME:
        return _BY_NAME[found]
    raise refuse(
        f"compression={show(name)}.",
        f"compression is one of {', '.join(map(repr, _BY_NAME))}.",
        f"Pass for instance compression={next(iter(_BY_NAME))!r}.",
    )


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
