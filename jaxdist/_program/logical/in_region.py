"""The operations of a region, as a function that can run where all mesh axes are manual."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jaxdist import _compat
from jaxdist._program.jaxprs.interpreter import Environment
from jaxdist._program.jaxprs.subprograms import has_subprogram, rewrite_programs, trace_again
from jaxdist._program.logical.placing import Region


@dataclasses.dataclass(frozen=True)
class InRegion:
    """A function that evaluates the operations of a region; it has their derivatives."""

    region: Region

    def __call__(self, *operands: Any) -> list[Any]:
        """Return the results of the region."""
        values = dict(zip(self.region.invars, operands, strict=True))
        env: Environment[Any] = Environment(_get_literal, values, self.region.alias)
        return _evaluate(self.region.eqns, env, self.region.outvars)


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
    return rewrite_programs(parameter, _trace_again) if has_subprogram(parameter) else parameter


def _trace_again(jaxpr: Any, consts: Sequence[Any]) -> Any:
    def same(*args: Any) -> list[Any]:
        values = (*map(_remove_mesh, consts), *args)
        given = zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True)
        env: Environment[Any] = Environment(_get_literal, dict(given))
        return _evaluate(jaxpr.eqns, env, jaxpr.outvars)

    return trace_again(same, jaxpr)
