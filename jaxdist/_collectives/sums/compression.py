"""Numbers in fewer bits, for links that are slow."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist._validate import shown
from jaxdist.errors import ArgumentError

# Numbers that share one scale. Their scale takes 4 bytes, 1.6 % of theirs.
BLOCK = 256


class Compression(abc.ABC):
    """A way to write vectors of float32 in fewer bytes, each row of a matrix by itself."""

    multiple: int

    @abc.abstractmethod
    def encoded(self, rows: jax.Array) -> jax.Array:
        """`[n, size]`, with a size that is a multiple of `multiple`, as `[n, bytes or halves]`."""

    @abc.abstractmethod
    def decoded(self, code: jax.Array) -> jax.Array:
        """The float32 numbers that `encoded` kept, `[n, size]`."""


@dataclasses.dataclass(frozen=True)
class HalfPrecision(Compression):
    """bfloat16: half of the bytes, 8 bits of precision."""

    multiple = 1

    def encoded(self, rows: jax.Array) -> jax.Array:
        """Rounded to the nearest."""
        # As bits: a backend may carry out collectives of bfloat16 in float32.
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def decoded(self, code: jax.Array) -> jax.Array:
        """Exactly what was kept."""
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Int8(Compression):
    """One byte for a number and a scale for each 256 of them: about a quarter of the bytes."""

    multiple = BLOCK

    def encoded(self, rows: jax.Array) -> jax.Array:
        """Every block in steps of 1/127 of its largest number; the scales stand at the end."""
        count = rows.shape[0]
        blocks = rows.reshape(count, -1, BLOCK)
        largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        # A block with a number that is not finite comes out as nan: what looks at gradients for
        # such numbers still finds them. `largest` does not tell; XLA's maximum of many numbers
        # on CPU leaves nan out.
        finite = jnp.all(jnp.isfinite(blocks), axis=-1, keepdims=True)
        scale = jnp.where(finite, jnp.where(largest == 0, 1.0, largest / 127), jnp.nan)
        steps = jnp.where(finite, jnp.round(blocks / scale), 1.0)
        numbers = steps.astype(jnp.int8).reshape(count, -1)
        scales = jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8).reshape(count, -1)
        return jnp.concatenate([numbers, scales], axis=1)

    def decoded(self, code: jax.Array) -> jax.Array:
        """Numbers times scales."""
        count, width = code.shape
        size = width // (BLOCK + 4) * BLOCK
        numbers = code[:, :size].reshape(count, -1, BLOCK).astype(jnp.float32)
        scales = code[:, size:].reshape(count, -1, 4)
        scale = jax.lax.bitcast_convert_type(scales, jnp.float32)
        return (numbers * scale[..., None]).reshape(count, size)


_BY_NAME: dict[str, Compression] = {"bf16": HalfPrecision(), "int8": Int8()}


def compression_of(caller: str, name: Any) -> Compression:
    """The compression of a name, or an error that lists them."""
    if isinstance(name, str) and name in _BY_NAME:
        return _BY_NAME[name]
    raise ArgumentError(
        f"{caller} was given compression={shown(name)}.\n\n"
        f"compression is one of {', '.join(map(repr, _BY_NAME))}.\n\n"
        f"Pass for instance compression={next(iter(_BY_NAME))!r}."
    )
