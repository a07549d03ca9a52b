"""Running a function on one logical device of each replica."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

Function = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class PlacedCall:
    """A call of `fn` that one logical device computes, while the others go on.

    The others get the results that they use, the same bits. What is `held` stays on the device:
    it is an array with a row for each logical device, of which only that one has something in it.

    Args:
        fn: A function of flat arrays.
        device: The logical device.
        axis: The mesh axis of logical devices.
        takes_held: For each operand, whether it is held.
        gives_held: For each result, whether it is held.
        widens: Whether results of 16 bits go to the others as 32: XLA's CPU backend aborts on
            sums of 16 bits where only some mesh axes are manual.
    """

    fn: Function
    device: int
    axis: str
    takes_held: tuple[bool, ...]
    gives_held: tuple[bool, ...]
    widens: bool

    def __call__(self, *operands: Any) -> list[Any]:
        """Run it; a gradient of the call is computed on the same device."""
        call = jax.custom_vjp(self._forward)
        call.defvjp(self._saving, self._backward)
        return list(call(*operands))

    def _forward(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self._on_device(self.fn, operands, self.takes_held, self.gives_held))

    def _saving(self, *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # Operands and not residuals, which would have to be told to the other devices.
        return self._forward(*operands), operands

    def _backward(self, operands: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
        out_floats = [i for i, ct in enumerate(cotangents) if jnp.issubdtype(ct.dtype, jnp.inexact)]

        def transposed(*values: Any) -> Sequence[Any]:
            own, given = list(values[: len(operands)]), values[len(operands) :]

            def of_floats(*xs: Any) -> list[Any]:
                full = list(own)
                for i, x in zip(floats, xs, strict=True):
                    full[i] = x
                results = list(self.fn(*full))
                return [results[i] for i in out_floats]

            _, pull = jax.vjp(of_floats, *(own[i] for i in floats))
            gradients: Sequence[Any] = pull(list(given))
            return gradients

        made = self._on_device(
            transposed,
            [*operands, *(cotangents[i] for i in out_floats)],
            (*self.takes_held, *(self.gives_held[i] for i in out_floats)),
            tuple(self.takes_held[i] for i in floats),
        )
        gradients: list[Any] = [None] * len(operands)
        for i, gradient in zip(floats, made, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    def _on_device(
        self,
        fn: Function,
        operands: Sequence[Any],
        takes_held: Sequence[bool],
        gives_held: Sequence[bool],
    ) -> list[Any]:
        whole, row = PartitionSpec(), PartitionSpec(self.axis)

        def on_each(*values: Any) -> list[Any]:
            own = [x[0] if held else x for x, held in zip(values, takes_held, strict=True)]
            impls: list[Any] = []

            def here(*xs: Any) -> list[Any]:
                results = fn(*xs)
                impls[:] = [jax.random.key_impl(y) if _is_key(y) else None for y in results]
                return list(results)

            def coded(*xs: Any) -> list[Any]:
                return [_coded(y, widens=self.widens) for y in here(*xs)]

            likes = jax.eval_shape(here, *own)
            empty = jax.eval_shape(coded, *own)
            made = jax.lax.cond(
                jax.lax.axis_index(self.axis) == self.device,
                coded,
                lambda *_: [jnp.zeros(c.shape, c.dtype) for c in empty],
                *own,
            )
            shared = [
                x if held else jax.lax.psum(x, self.axis)
                for x, held in zip(made, gives_held, strict=True)
            ]
            results = [
                _decoded(x, like, impl, widens=self.widens)
                for x, like, impl in zip(shared, likes, impls, strict=True)
            ]
            return [x[None] if held else x for x, held in zip(results, gives_held, strict=True)]

        mapped = jax.shard_map(
            on_each,
            in_specs=tuple(row if held else whole for held in takes_held),
            out_specs=[row if held else whole for held in gives_held],
            axis_names={self.axis},
            check_vma=False,
        )
        results: list[Any] = mapped(*operands)
        return results


# A sum in which all but one are zero gives the one, and of its bits as integers to the bit (as
# floats -0 would come out as 0).


@dataclasses.dataclass(frozen=True)
class _Bits:
    """How arrays of one kind travel."""

    narrow: Any  # integers or floats of whole bytes that have all values
    unsigned: Any
    wide: Any

    @classmethod
    def of(cls, dtype: Any, *, widens: bool) -> "_Bits":
        narrow = dtype
        if dtype == jnp.bool_ or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8):
            narrow = np.dtype("int8")
        elif jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
            narrow = np.dtype("float32")
        unsigned = np.dtype(f"uint{8 * np.dtype(narrow).itemsize}")
        is_wide = widens and unsigned.itemsize == 2
        return cls(narrow, unsigned, np.dtype("uint32") if is_wide else unsigned)

    def code(self, value: Any) -> jax.Array:
        raw = jax.lax.bitcast_convert_type(value.astype(self.narrow), self.unsigned)
        return raw.astype(self.wide)

    def decode(self, coded: Any, dtype: Any) -> jax.Array:
        raw = jax.lax.bitcast_convert_type(coded.astype(self.unsigned), self.narrow)
        return raw.astype(dtype)


def _coded(value: Any, *, widens: bool) -> jax.Array:
    if _is_key(value):
        return jax.random.key_data(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    return _Bits.of(value.dtype, widens=widens).code(value)


def _decoded(coded: Any, like: Any, impl: Any, *, widens: bool) -> jax.Array:
    if impl is not None:
        return jax.random.wrap_key_data(coded, impl=impl)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        part = np.dtype(f"float{4 * np.dtype(like.dtype).itemsize}")
        real, imag = _Bits.of(part, widens=widens).decode(coded, part)
        return jax.lax.complex(real, imag)
    return _Bits.of(like.dtype, widens=widens).decode(coded, like.dtype)


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
