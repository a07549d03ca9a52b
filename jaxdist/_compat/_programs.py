"""Traced programs: taken apart, changed and staged again."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src.interpreters import pxla as _pxla
from jax._src.state.types import AbstractRef as _AbstractRef
from jax.extend.core import ClosedJaxpr


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried.

    JAX 0.12 has them as a tree of trees; 0.10 as two numbers. Goes when 0.10 goes.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# Calls of one sub-program with the operands as they are, and the parameter that holds it; by the
# names of all versions.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def call_traced(
    closed: Any,
    params: dict[str, Any],
    parts: Sequence[tuple[int, int]],
    arguments: Sequence[Any],
) -> list[Any]:
    """Stage a traced program, with other parameters of its last equation, without tracing it.

    Binding the equation would trace its body again: a third of the time of tracing and lowering.
    A jitted call carries its program along as it is. Waits for a `shard_map` whose `out_specs`
    may depend on its body.

    Args:
        closed: A program that ends in a `shard_map` and returns its results.
        params: New parameters of that `shard_map`.
        parts: For each result, on which dim how many local ones lie one after the other.
        arguments: What to call it with.
    """
    eqn = closed.jaxpr.eqns[-1]
    results = []
    for var, (dim, count) in zip(eqn.outvars, parts, strict=True):
        local = var.aval
        shape = tuple(n * count if d == dim else n for d, n in enumerate(local.shape))
        results.append(_core.Var(local.update(shape=shape)))
    last = eqn.replace(params=params, outvars=results)
    jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns[:-1], last], outvars=results)
    # JAX 0.12 has one class for open and closed programs.
    program = jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)
    bound = _jitted_params(program, len(arguments), len(results))
    return list(_jit_equation().primitive.bind(*arguments, **bound))


@functools.cache
def _jit_equation() -> Any:
    return jax.make_jaxpr(jax.jit(lambda x: x + 1))(0).jaxpr.eqns[-1]


def _jitted_params(program: Any, num_arguments: int, num_results: int) -> dict[str, Any]:
    params = dict(_jit_equation().params, jaxpr=program, name="step")
    for name, value in params.items():
        if isinstance(value, tuple) and len(value) == 1:
            params[name] = value * (num_results if name.startswith("out_") else num_arguments)
    return params


def is_ref(variable: Any) -> bool:
    """Whether a variable of a program is a mutable reference. Waits for a public name."""
    return isinstance(variable.aval, _AbstractRef)


def without_refs(closed: Any) -> Any:
    """A program that ends in a `shard_map`, with the refs made in its body turned into values.

    JAX does the same when it lowers a program. Waits for a public way to do it before.
    """
    eqn = closed.jaxpr.eqns[-1]
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    with (
        _shard_map._extend_axis_env(mesh, manual),
        _mesh.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)),
        _config._check_vma(eqn.params["check_vma"]),
    ):
        pure = _pxla._discharge_internal_refs(ClosedJaxpr(eqn.params["jaxpr"], ()))
    params = {**eqn.params, "jaxpr": getattr(pure, "jaxpr", pure)}
    last = eqn.replace(params=params, effects=_without_ref_effects(eqn.effects))
    jaxpr = closed.jaxpr.replace(
        eqns=[*closed.jaxpr.eqns[:-1], last], effects=_without_ref_effects(closed.jaxpr.effects)
    )
    return jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)


def _without_ref_effects(effects: Any) -> frozenset[Any]:
    return frozenset(e for e in effects if not isinstance(e, _core.InternalMutableArrayEffect))
