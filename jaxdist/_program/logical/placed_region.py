"""Calls of functions that run on one logical device of each replica."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxdist import _compat
from jaxdist._program.jaxprs.interpreter import Environment
from jaxdist._program.jaxprs.subprograms import rewrite_programs, trace_again
from jaxdist._program.logical.placing import Region

Function = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Part:
    """The function that one logical device computes.

    A local array stays on its device. It has one row for each logical device, and only the row of
    that device has values.

    Args:
        fn: A function of flat arrays.
        device: The logical device.
        takes_local: For each operand, whether it is local.
        returns_local: For each result, whether it is local.
    """

    fn: Function
    device: int
    takes_local: tuple[bool, ...]
    returns_local: tuple[bool, ...]

    def transpose(self, operands: Sequence[Any], cotangents: Sequence[Any]) -> "Part":
        """Return the part that computes the cotangents of the operands.

        Its operands are those of this part and the cotangents of float results. Its results are the
        cotangents of float operands.
        """
        floats, out_floats = find_floats(operands), find_floats(cotangents)
        count = len(operands)

        def pull_back(*values: Any) -> Sequence[Any]:
            own, given = list(values[:count]), list(values[count:])

            def forward(*xs: Any) -> list[Any]:
                full = list(own)
                for i, x in zip(floats, xs, strict=True):
                    full[i] = x
                results = list(self.fn(*full))
                return [results[i] for i in out_floats]

            _, pull = jax.vjp(forward, *(own[i] for i in floats))
            return pull(given)

        return Part(
            pull_back,
            self.device,
            (*self.takes_local, *(self.returns_local[i] for i in out_floats)),
            tuple(self.takes_local[i] for i in floats),
        )


@dataclasses.dataclass(frozen=True)
class PlacedCall:
    """A call of several functions at the same time, each on its logical device.

    The other devices get the results that are not local, bit by bit.

    Args:
        parts: The functions, on different devices. The call takes their operands concatenated,
            and returns their results concatenated.
        axis: The mesh axis of logical devices.
        widens: Whether results of 16 bits are sent as 32 bits: XLA's CPU backend aborts on sums of
            16 bits if only some mesh axes are manual.
    """

    parts: tuple[Part, ...]
    axis: str
    widens: bool

    def __call__(self, *operands: Any) -> list[Any]:
        """Run the functions; gradients of the call are computed on the same devices."""
        call = jax.custom_vjp(self._forward)
        call.defvjp(self._save, self._backward)
        return list(call(*operands))

    def _forward(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self._run(self.parts, operands))

    def _save(self, *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # Save operands, not residuals: residuals would have to be sent to the other devices.
        return self._forward(*operands), operands

    def _backward(self, operands: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        given = _split(operands, [len(p.takes_local) for p in self.parts])
        back = _split(cotangents, [len(p.returns_local) for p in self.parts])
        pairs = list(zip(self.parts, given, back, strict=True))
        parts = [part.transpose(own, cts) for part, own, cts in pairs]
        values = [[*own, *(cts[i] for i in find_floats(cts))] for _, own, cts in pairs]
        made = iter(self._run(parts, [x for row in values for x in row]))
        gradients: list[Any] = []
        for own in given:
            floats = find_floats(own)
            gradients += [next(made) if i in floats else None for i in range(len(own))]
        return tuple(gradients)

    def _run(self, parts: Sequence[Part], operands: Sequence[Any]) -> list[Any]:
        whole, row = PartitionSpec(), PartitionSpec(self.axis)
        takes_local = [is_local for p in parts for is_local in p.takes_local]
        returns_local = [is_local for p in parts for is_local in p.returns_local]

        def on_each(*values: Any) -> list[Any]:
            own = [x[0] if is_local else x for x, is_local in zip(values, takes_local, strict=True)]
            shares = _split(own, [len(p.takes_local) for p in parts])
            coded = [
                _EncodedFunction(p.fn, xs, self.widens) for p, xs in zip(parts, shares, strict=True)
            ]

            def branch(chosen: int | None) -> list[Any]:
                return [
                    x
                    for i, (part, xs) in enumerate(zip(coded, shares, strict=True))
                    for x in (part.encode(xs) if i == chosen else part.zeros())
                ]

            # Branch 0 is for devices without a part; part i has branch i + 1.
            place = jax.lax.axis_index(self.axis)
            number = sum((i + 1) * (place == p.device) for i, p in enumerate(parts))
            choices: list[Any] = [lambda i=i: branch(i) for i in (None, *range(len(parts)))]
            made = jax.lax.switch(number, choices)
            shared = [
                x if is_local else jax.lax.psum(x, self.axis)
                for x, is_local in zip(made, returns_local, strict=True)
            ]
            lengths = [len(p.returns_local) for p in parts]
            rows = zip(coded, _split(shared, lengths), strict=True)
            results = [y for part, xs in rows for y in part.decode(xs)]
            return [
                y[None] if is_local else y
                for y, is_local in zip(results, returns_local, strict=True)
            ]

        mapped = jax.shard_map(
            on_each,
            in_specs=tuple(row if is_local else whole for is_local in takes_local),
            out_specs=[row if is_local else whole for is_local in returns_local],
            axis_names={self.axis},
            check_vma=False,
        )
        return mapped(*operands)


def find_floats(values: Sequence[Any]) -> list[int]:
    """Return the positions of the values that have a derivative."""
    return [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _split(values: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Split concatenated values into lists of these lengths."""
    left = iter(values)
    return [[next(left) for _ in range(length)] for length in lengths]


class _EncodedFunction:
    """A function whose results are encoded as integers; see `_Bits`."""

    def __init__(self, fn: Function, operands: Sequence[Any], widens: bool) -> None:
        self._fn, self._widens = fn, widens
        self._impls: list[Any] = []
        self._likes: list[Any] = jax.eval_shape(self._call, *operands)
        self._empty: list[Any] = jax.eval_shape(lambda *xs: self.encode(xs), *operands)

    def _call(self, *operands: Any) -> list[Any]:
        results = list(self._fn(*operands))
        self._impls = [jax.random.key_impl(y) if _is_key(y) else None for y in results]
        return results

    def encode(self, operands: Sequence[Any]) -> list[jax.Array]:
        """Return the encoded results, on the device that computes them."""
        return [_encode(y, widens=self._widens) for y in self._call(*operands)]

    def zeros(self) -> list[jax.Array]:
        """Return zeros in the shapes of the encoded results, for the other devices."""
        return [jnp.zeros(x.shape, x.dtype) for x in self._empty]

    def decode(self, coded: Sequence[Any]) -> list[jax.Array]:
        """Decode the results."""
        return [
            _decode(x, like, impl, widens=self._widens)
            for x, like, impl in zip(coded, self._likes, self._impls, strict=True)
        ]


# The results are sent by an all-reduce in which all devices but one have zeros. On integers it
# returns the bits of that one exactly; on floats, -0 + 0 would give 0.


@dataclasses.dataclass(frozen=True)
class _Bits:
    """The dtypes in which arrays of one dtype are encoded."""

    narrow: Any  # a dtype of whole bytes that has all values of the original dtype
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


def _encode(value: Any, *, widens: bool) -> jax.Array:
    if _is_key(value):
        return jax.random.key_data(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    return _Bits.of(value.dtype, widens=widens).code(value)


def _decode(coded: Any, like: Any, impl: Any, *, widens: bool) -> jax.Array:
    if impl is not None:
        return jax.random.wrap_key_data(coded, impl=impl)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        part = np.dtype(f"float{4 * np.dtype(like.dtype).itemsize}")
        real, imag = _Bits.of(part, widens=widens).decode(coded, part)
        return jax.lax.complex(real, imag)
    return _Bits.of(like.dtype, widens=widens).decode(coded, like.dtype)


def _is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def run_region(region: Region, *operands: Any) -> list[Any]:
    """Evaluate the operations of a region where all mesh axes are manual."""
    values = dict(zip(region.invars, operands, strict=True))
    env: Environment[Any] = Environment(_get_literal, values, region.alias)
    return _evaluate(region.eqns, env, region.outvars)


def _evaluate(eqns: Sequence[Any], env: Environment[Any], results: Sequence[Any]) -> list[Any]:
    for eqn in eqns:
        params = {k: _use_current_mesh(v) for k, v in eqn.params.items()}
        params = _compat.rewrite_derivatives(params, _trace_again, eqn)
        made = _compat.bind_like(eqn, env.read_all(eqn.invars), params, in_current_mesh=True)
        env.write(eqn.outvars, made)
    return env.read_all(results)


def _get_literal(literal: Any) -> Any:
    return _remove_mesh(literal.val)


def _remove_mesh(value: Any) -> Any:
    """Return a constant without a mesh; a constant in a program has the mesh of the trace."""
    has_bits = hasattr(value, "dtype") and not isinstance(value, jax.core.Tracer)
    if not has_bits or jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return np.asarray(value)


def _use_current_mesh(parameter: Any) -> Any:
    """Return a parameter of an operation for the mesh of the caller."""
    if isinstance(parameter, NamedSharding) and isinstance(parameter.mesh, AbstractMesh):
        return NamedSharding(jax.sharding.get_abstract_mesh(), parameter.spec)
    # The shapes in sub-programs have the mesh of their trace too.
    return rewrite_programs(parameter, _trace_again)


def _trace_again(jaxpr: Any, consts: Sequence[Any]) -> Any:
    def same(*args: Any) -> list[Any]:
        values = (*map(_remove_mesh, consts), *args)
        given = zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True)
        env: Environment[Any] = Environment(_get_literal, dict(given))
        return _evaluate(jaxpr.eqns, env, jaxpr.outvars)

    return trace_again(same, jaxpr)
