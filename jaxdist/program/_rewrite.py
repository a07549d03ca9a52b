"""Replaying a trace with reductions of bf16 done in f32.

XLA's CPU backend aborts the process on bf16 reductions in programs where only some mesh axes are
manual, and no compile option of ours reaches a program that is traced inside a user's own jit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxdist import _compat

_REDUCTIONS = frozenset(
    {"psum", "pmax", "pmin", "reduce_scatter", "psum_scatter", "psum_invariant"}
)
_SUBPROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "cond_jaxpr", "body_jaxpr", "branches")
_INLINED = frozenset(
    {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "closed_call", "core_call"}
)


def needs_widening(jaxpr: Any) -> bool:
    """Whether a bf16 reduction is anywhere in `jaxpr`."""
    return any(
        _is_narrow_reduction(e) or any(needs_widening(s) for s in _subprograms(e))
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def call_as_is(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluate `jaxpr`."""
    results: list[Any] = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*args)
    return results


def call_widened(jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """Evaluate `jaxpr` with every bf16 reduction in f32."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, operands: list[Any]) -> list[Any]:
    if _is_narrow_reduction(eqn):
        wide = [_widen(x) for x in operands]
        results = _bind(eqn, wide, eqn.params)
        return [r.astype(v.aval.dtype) for r, v in zip(results, eqn.outvars, strict=True)]
    if not any(needs_widening(s) for s in _subprograms(eqn)):
        return _bind(eqn, operands, eqn.params)
    if eqn.primitive.name in _INLINED:
        inner = next(iter(_subprograms(eqn)))
        return call_widened(getattr(inner, "jaxpr", inner), operands, getattr(inner, "consts", ()))
    params = {k: _widened(v) if k in _SUBPROGRAMS else v for k, v in eqn.params.items()}
    return _bind(eqn, operands, params)


def _bind(eqn: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    results = _compat.bind_like(eqn, operands, params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _widened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_widened(v) for v in value)
    inner = getattr(value, "jaxpr", value)
    consts = getattr(value, "consts", ())

    def again(*args: Any) -> list[Any]:
        return call_widened(inner, args, consts)

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.invars]
    closed = _traced(again, avals)
    return closed if isinstance(value, ClosedJaxpr) else closed.jaxpr


def _traced(fun: Callable[..., Any], avals: list[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*avals)


def _is_narrow_reduction(eqn: Any) -> bool:
    return eqn.primitive.name in _REDUCTIONS and any(
        v.aval.dtype == jnp.bfloat16 for v in eqn.invars
    )


def _widen(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _subprograms(eqn: Any) -> list[Any]:
    found: list[Any] = []
    for key in _SUBPROGRAMS:
        value = eqn.params.get(key)
        values = value if isinstance(value, tuple) else (value,)
        found += [v for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]
    return found
