"""Compressed numbers for slow links."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._called import refuse
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
