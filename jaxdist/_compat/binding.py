"""Equations of a jaxpr, bound again in another trace."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import linear_util as _linear_util
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax.extend.core import ClosedJaxpr

from jaxdist._compat.meshes import use_abstract_mesh


def rewrite_derivatives(
    params: dict[str, Any], rewrite: Callable[[Any, Sequence[Any]], Any], traced_in: Any = None
) -> dict[str, Any]:
    """Return the parameters of a custom-derivative call with a rewritten forward rule.

    JAX traces the rule when the call is differentiated. `traced_in` is an equation whose mesh is
    used for that trace, if it differs from the caller's mesh. The backward rule of a
    `custom_vjp` is not changed.
    """
    changed = dict(params)
    # A `custom_jvp_call` has the first of the two parameters, a `custom_vjp_call` the second.
    mesh = None if traced_in is None else traced_in.ctx.cur_abstract_mesh
    for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if name in params:
            changed[name] = _rewrite_rule(params[name], rewrite, mesh)
    return changed


def _rewrite_rule(rule: Any, rewrite: Callable[[Any, Sequence[Any]], Any], mesh: Any) -> Any:
    def trace_rule(*zeros: Any) -> Any:
        with contextlib.nullcontext() if mesh is None else use_abstract_mesh(mesh):
            jaxpr, consts, *rest = rule.call_wrapped(*zeros)
        closed = rewrite(jaxpr, consts)
        return closed.jaxpr, closed.consts, *rest

    return _linear_util.wrap_init(trace_rule, debug_info=rule.debug_info)


def rewrite_jvp(rule: Any, rewrite: Callable[[Any, Any, Any], Any]) -> Any:
    """Return the forward rule of a `custom_jvp_call`, rewritten when the call is differentiated.

    `rewrite` takes the program of the rule (a function of the operands and of the nonzero
    tangents), which operand tangents are zero, and which result tangents are zero. It returns
    another program.
    """

    def trace_rule(*zeros: Any) -> Any:
        jaxpr, consts, out_zeros = rule.call_wrapped(*zeros)
        closed = rewrite(ClosedJaxpr(jaxpr, consts), zeros, out_zeros)
        return closed.jaxpr, closed.consts, out_zeros

    return _linear_util.wrap_init(trace_rule, debug_info=rule.debug_info)


def use_source_of(eqn: Any) -> Any:
    """Return a context in which new operations get the source line of an equation."""
    names = _source_info.current_name_stack() + eqn.source_info.name_stack
    return _source_info.user_context(eqn.source_info.traceback, name_stack=names)


def bind_like(
    eqn: Any, operands: Sequence[Any], params: dict[str, Any], *, in_current_mesh: bool = False
) -> list[Any]:
    """Bind the operation of an equation again, with its source line and configuration.

    Args:
        eqn: The equation.
        operands: The new operands.
        params: The new parameters.
        in_current_mesh: Whether the mesh is that of the caller instead of that of the equation.

    Returns:
        Its results: a list of one if the primitive has a single result.
    """
    mesh = (
        use_abstract_mesh(_mesh.get_abstract_mesh())
        if in_current_mesh
        else contextlib.nullcontext()
    )
    params = eqn.primitive.get_bind_params(params)
    # `mesh` is entered last: the configuration of an equation contains a mesh too.
    with use_source_of(eqn), eqn.ctx.manager, mesh:
        results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def make_weak(array: Any) -> Any:
    """Return an array whose dtype yields to others, like that of a Python number.

    Waits for a public argument `weak_type` of `jax.lax.convert_element_type`.
    """
    return jax.lax.convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )
