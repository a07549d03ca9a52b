"""Replaying a trace with what cannot run where only some mesh axes are manual put in other words.

Two things cannot: XLA's CPU backend aborts the process on reductions of bf16 (no compile option
of ours reaches a program that is traced inside a user's own jit), and JAX refuses callbacks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist.program._subprograms import holds_programs, subprograms

_REDUCTIONS = frozenset(
    {"psum", "pmax", "pmin", "reduce_scatter", "psum_scatter", "psum_invariant"}
)
_INLINED = frozenset({"closed_call", "core_call"})


@dataclasses.dataclass(frozen=True)
class PartialAutoRewrite:
    """Rewrites for programs in which `automatic` axes are left to GSPMD.

    Reductions of bf16 are done in f32, if `widens`. A pure callback runs once on each logical
    device, on the whole value.
    """

    automatic: frozenset[str]
    widens: bool

    def applies_to(self, jaxpr: Any) -> bool:
        """Whether anything in `jaxpr` has to be rewritten."""
        return any(
            self._is_narrow(e)
            or e.primitive.name == "pure_callback"
            or any(self.applies_to(s) for s in _inner(e))
            for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
        )

    def call(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Evaluate `jaxpr`, rewritten."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if self._is_narrow(eqn):
            results = _bind(eqn, [_widen(x) for x in operands], eqn.params)
            return [r.astype(v.aval.dtype) for r, v in zip(results, eqn.outvars, strict=True)]
        if eqn.primitive.name == "pure_callback":
            return self._callback(eqn, operands)
        if not any(self.applies_to(s) for s in _inner(eqn)):
            return _bind(eqn, operands, eqn.params)
        if eqn.primitive.name in _INLINED:
            inner = next(iter(_inner(eqn)))
            return self.call(getattr(inner, "jaxpr", inner), operands, _consts(inner))
        params = {k: self._again(v) if holds_programs(v) else v for k, v in eqn.params.items()}
        # A caller may differentiate the whole: the rules of the user's own derivatives stay.
        return _bind(eqn, operands, _compat.rewritten_derivatives(params, self._traced_again))

    def _callback(self, eqn: Any, operands: list[Any]) -> list[Any]:
        def whole(*values: Any) -> list[Any]:
            return _bind(eqn, list(values), eqn.params)

        mapped = jax.shard_map(
            whole,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names=self.automatic,
            check_vma=False,
        )
        results: list[Any] = mapped(*operands)
        return results

    def _again(self, value: Any) -> Any:
        """A sub-program, traced anew."""
        if isinstance(value, tuple):
            again = [self._again(v) for v in value]
            return type(value)(*again) if hasattr(value, "_fields") else tuple(again)
        closed = self._traced_again(getattr(value, "jaxpr", value), _consts(value))
        return closed if isinstance(value, ClosedJaxpr) else closed.jaxpr

    def _traced_again(self, jaxpr: Any, consts: Sequence[Any]) -> Any:
        def rewritten(*args: Any) -> list[Any]:
            return self.call(jaxpr, args, consts)

        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        return jax.make_jaxpr(rewritten)(*avals)

    def _is_narrow(self, eqn: Any) -> bool:
        return (
            self.widens
            and eqn.primitive.name in _REDUCTIONS
            and any(v.aval.dtype == jnp.bfloat16 for v in eqn.invars)
        )


def _bind(eqn: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    results = _compat.bind_like(eqn, operands, params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _widen(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _consts(value: Any) -> Sequence[Any]:
    held: Sequence[Any] = getattr(value, "consts", ())
    return held


def _inner(eqn: Any) -> list[Any]:
    """Sub-programs to look into; a `shard_map` of the user's makes the automatic axes manual."""
    return [] if eqn.primitive.name == "shard_map" else subprograms(eqn)
