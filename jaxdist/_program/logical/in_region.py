"""The operations of a region, as a function that can be called where all mesh axes are manual."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import AbstractMesh, NamedSharding

from jaxdist import _compat
from jaxdist._program.jaxprs.subprograms import holds_programs
from jaxdist._program.logical.placing import Region


@dataclasses.dataclass(frozen=True)
class InRegion:
    """Evaluates the operations of a region, and differentiates as they do."""

    region: Region

    def __call__(self, *operands: Any) -> list[Any]:
        """The results of the region."""
        env = dict(zip(self.region.invars, operands, strict=True))
        return _evaluated(self.region.eqns, env, self.region.outvars, self.region.alias)


def _evaluated(
    eqns: Sequence[Any], env: dict[Any, Any], results: Sequence[Any], alias: dict[Any, Any]
) -> list[Any]:
    def read(atom: Any) -> Any:
        found = atom if isinstance(atom, Literal) else alias.get(atom, atom)
        return _without_mesh(found.val) if isinstance(found, Literal) else env[found]

    for eqn in eqns:
        operands = [read(v) for v in eqn.invars]
        params = {k: _here(v) for k, v in eqn.params.items()}
        params = _compat.rewritten_derivatives(params, _traced_again, eqn)
        made = _compat.bind_here(eqn, operands, params)
        outs = made if eqn.primitive.multiple_results else [made]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in results]


def _without_mesh(value: Any) -> Any:
    """A constant that knows no mesh; those in programs know the one that was traced over."""
    has_bits = hasattr(value, "dtype") and not isinstance(value, jax.core.Tracer)
    if not has_bits or jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return np.asarray(value)


def _here(parameter: Any) -> Any:
    """A parameter of an operation, for the mesh of the caller."""
    if isinstance(parameter, NamedSharding) and isinstance(parameter.mesh, AbstractMesh):
        return NamedSharding(jax.sharding.get_abstract_mesh(), parameter.spec)
    return _again(parameter) if holds_programs(parameter) else parameter


def _again(value: Any) -> Any:
    """A sub-program traced anew: shapes in programs know the mesh that they were traced over."""
    if isinstance(value, tuple):
        again = [_again(v) for v in value]
        return type(value)(*again) if hasattr(value, "_fields") else tuple(again)
    closed = _traced_again(getattr(value, "jaxpr", value), getattr(value, "consts", ()))
    return closed if isinstance(value, ClosedJaxpr) else closed.jaxpr


def _traced_again(jaxpr: Any, consts: Sequence[Any]) -> Any:
    def same(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(_without_mesh, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        return _evaluated(jaxpr.eqns, env, jaxpr.outvars, {})

    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(same)(*avals)
