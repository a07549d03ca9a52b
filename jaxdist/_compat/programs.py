"""Functions that read and rewrite traced programs (jaxprs), and stage them again."""

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import shard_map as _shard_map
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.state.types import AbstractRef as _AbstractRef
from jax._src.state.types import AccumEffect as _AccumEffect
from jax._src.state.types import WriteEffect as _WriteEffect
from jax.extend.core import ClosedJaxpr


def get_scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carries among the operands of a `scan`.

    JAX 0.12 stores them as a tree of trees, and 0.10 as two numbers. Waits for the end of 0.10.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# Primitives that call one sub-program with their own operands, and the parameter that holds it;
# with the names of all supported versions of JAX.
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


def stage_with_params(
    closed: Any,
    params: dict[str, Any],
    parts: Sequence[tuple[int, int]],
    arguments: Sequence[Any],
) -> list[Any]:
    """Stage a traced program with new parameters of its last equation, without tracing it again.

    Binding the equation would trace its body again: a third of the time of tracing and lowering.
    A `jit` equation contains its program and is staged without a trace. Waits for a `shard_map`
    whose `out_specs` may depend on its body.

    Args:
        closed: A program that ends in a `shard_map` and returns its results.
        params: New parameters of that `shard_map`.
        parts: For each result, the dim on which local results are concatenated, and their number.
        arguments: The arguments of the call.
    """
    eqn = closed.jaxpr.eqns[-1]
    results = []
    for var, (dim, count) in zip(eqn.outvars, parts, strict=True):
        local = var.aval
        shape = tuple(n * count if d == dim else n for d, n in enumerate(local.shape))
        results.append(_core.Var(local.update(shape=shape)))
    last = eqn.replace(params=params, outvars=results)
    program = _replace_last(closed, last, outvars=results)
    bound = _make_jit_params(program, len(arguments), len(results))
    return list(_jit_equation().primitive.bind(*arguments, **bound))


# The parameters of a `jit` equation differ between versions of JAX. A traced one is the template.
@functools.cache
def _jit_equation() -> Any:
    return jax.make_jaxpr(jax.jit(lambda x: x + 1))(0).jaxpr.eqns[-1]


def _make_jit_params(program: Any, num_arguments: int, num_results: int) -> dict[str, Any]:
    params = dict(_jit_equation().params, jaxpr=program, name="step")
    # Shardings, layouts and so on have one entry per argument or per result; the template has one
    # argument and one result.
    for name, value in params.items():
        if isinstance(value, tuple) and len(value) == 1:
            params[name] = value * (num_results if name.startswith("out_") else num_arguments)
    return params


def remove_placeholders(program: Any, primitive: Any) -> tuple[Any, dict[int, Any]]:
    """Return a program without its operations of `primitive`, and their results by `number`.

    These results are then free variables, which the caller makes inputs. JAX has no public way to
    add inputs to a program while it is traced.
    """
    jaxpr = getattr(program, "jaxpr", program)
    marks = {e.params["number"]: e.outvars[0] for e in jaxpr.eqns if e.primitive is primitive}
    return jaxpr.replace(eqns=[e for e in jaxpr.eqns if e.primitive is not primitive]), marks


def append_inputs(jaxpr: Any, variables: Sequence[Any]) -> Any:
    """Return an open program with these variables appended to its inputs."""
    return jaxpr.replace(**_make_inputs(jaxpr, [*jaxpr.invars, *variables]))


def move_constants_to_inputs(jaxpr: Any) -> ClosedJaxpr:
    """Return a program that takes its constants as its first inputs."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return ClosedJaxpr(jaxpr.replace(constvars=[], **_make_inputs(jaxpr, inputs)), ())


def add_body_inputs(
    closed: Any, body: Any, new: Sequence[tuple[Any, Any]], order: Sequence[int]
) -> Any:
    """Return a program that ends in a `shard_map` of `body`, which has additional inputs.

    Args:
        closed: The program.
        body: The new body of the `shard_map`; its new inputs follow the old ones.
        new: For each new input the global array as a `jax.ShapeDtypeStruct`, and its spec.
        order: The order of the inputs of the result: indices into the inputs of `closed`,
            followed by the new ones.
    """
    eqn = closed.jaxpr.eqns[-1]
    added = [_core.Var(_core.ShapedArray(array.shape, array.dtype)) for array, _ in new]
    specs = (*eqn.params["in_specs"], *(spec for _, spec in new))
    params = {**eqn.params, "jaxpr": body, "in_specs": specs}
    last = eqn.replace(params=params, invars=[*eqn.invars, *added])
    inputs = [*closed.jaxpr.invars, *added]
    return _replace_last(closed, last, **_make_inputs(closed.jaxpr, [inputs[n] for n in order]))


def _make_inputs(jaxpr: Any, variables: Sequence[Any]) -> dict[str, Any]:
    # JAX checks that there are as many argument names as inputs; the old names do not fit.
    info = jaxpr.debug_info._replace(arg_names=("",) * len(variables))
    return {"invars": list(variables), "debug_info": info}


def _replace_last(closed: Any, last: Any, **changes: Any) -> Any:
    jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns[:-1], last], **changes)
    # JAX 0.12 has one class for open and closed jaxprs.
    return jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)


def is_ref(variable: Any) -> bool:
    """Whether a variable of a jaxpr is a mutable reference. Waits for a public name."""
    return isinstance(variable.aval, _AbstractRef)


def is_mutable(value: Any) -> bool:
    """Whether a value, concrete or traced, is a mutable array of `jax.new_ref`."""
    return isinstance(getattr(value, "aval", None), _AbstractRef) or isinstance(value, jax.Ref)


def has_write_to(jaxpr: Any, ref: Any) -> bool:
    """Whether an open program writes to one of its inputs, a mutable reference."""
    return any(
        isinstance(e, (_WriteEffect, _AccumEffect)) and e.input is ref for e in jaxpr.effects
    )


def discharge_refs(closed: Any) -> Any:
    """Return a program that ends in a `shard_map`, with references made in its body as values.

    JAX does the same when it lowers a program. Waits for a public way to do it earlier.
    """
    eqn = closed.jaxpr.eqns[-1]
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    # The body contains collectives over the axes of the mesh, so the same environment as in the
    # trace of the `shard_map` is needed.
    with (
        _shard_map._extend_axis_env(mesh, manual),
        _mesh.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)),
        _config._check_vma(eqn.params["check_vma"]),
    ):
        pure = _pxla._discharge_internal_refs(ClosedJaxpr(eqn.params["jaxpr"], ()))
    params = {**eqn.params, "jaxpr": getattr(pure, "jaxpr", pure)}
    last = eqn.replace(params=params, effects=_without_ref_effects(eqn.effects))
    return _replace_last(closed, last, effects=_without_ref_effects(closed.jaxpr.effects))


def _without_ref_effects(effects: Any) -> frozenset[Any]:
    return frozenset(e for e in effects if not isinstance(e, _core.InternalMutableArrayEffect))


def has_side_effects(eqn: Any) -> bool:
    """Whether an equation does more than compute its results from operands and axis indices."""
    return any(not isinstance(e, _core.NamedAxisEffect) for e in eqn.effects)


def drop_unused(closed: Any, keep: Sequence[int]) -> tuple[Any, list[int]]:
    """Return a program with some of its results, and only the operations that these need.

    Args:
        closed: A closed program.
        keep: The numbers of the results to keep, in the order of the program.

    Returns:
        The smaller program, and the numbers of the inputs that it has.
    """
    used = [n in set(keep) for n in range(len(closed.jaxpr.outvars))]
    jaxpr, is_used = _partial_eval.dce_jaxpr(closed.jaxpr, used)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    consts = [constants[v] for v in jaxpr.constvars]
    return ClosedJaxpr(jaxpr, consts), _numbers(is_used)


_RULES_TAKE_READS = len(inspect.signature(_partial_eval._default_dce_rule).parameters) == 3


def drop_results(eqn: Any, keep: Collection[int]) -> tuple[Any, list[int], list[int]] | None:
    """Return an equation that computes only some of the results of another one.

    Args:
        eqn: An equation that holds a program: a call, a loop or a branch.
        keep: The numbers of the results to keep.

    Returns:
        The equation, and the numbers of the operands and of the results that it has. It has more
        results than requested where a loop needs them in its carry. None if the primitive has no
        rule for this, or the equation has effects.
    """
    if has_side_effects(eqn):
        return None
    wanted = [n in keep for n in range(len(eqn.outvars))]
    if eqn.primitive.name == "while":
        return _drop_of_while(eqn, wanted)
    rule: Any = _partial_eval.dce_rules.get(eqn.primitive)
    if rule is None:
        return None
    # JAX 0.12 also tells a rule which mutable operands are read later.
    is_read = [[True] * len(eqn.invars)] if _RULES_TAKE_READS else []
    used, made = rule(wanted, *is_read, eqn)
    if made is None:
        return None
    number = {id(v): n for n, v in enumerate(eqn.outvars)}
    return made, _numbers(used), [number[id(v)] for v in made.outvars]


def _numbers(flags: Sequence[bool]) -> list[int]:
    return [n for n, flag in enumerate(flags) if flag]


def _drop_of_while(eqn: Any, wanted: list[bool]) -> tuple[Any, list[int], list[int]]:
    # JAX 0.10 has no rule for `while`.
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    _, read = _partial_eval.dce_jaxpr(condition.jaxpr, [True])
    needed = [w or r for w, r in zip(wanted, read[of_condition:], strict=True)]
    while True:
        _, used = _partial_eval.dce_jaxpr(body.jaxpr, needed)
        more = [n or u for n, u in zip(needed, used[of_body:], strict=True)]
        if more == needed:
            break
        needed = more
    own = [*used[:of_body], *needed]
    small, _ = _partial_eval.dce_jaxpr(body.jaxpr, needed, instantiate=own)
    invars = condition.jaxpr.invars
    same = condition.jaxpr.replace(
        invars=[*invars[:of_condition], *(invars[of_condition + n] for n in _numbers(needed))],
        debug_info=condition.jaxpr.debug_info.with_unknown_names(),
    )
    numbers = _numbers([True] * of_condition + own)
    made = eqn.replace(
        invars=[eqn.invars[n] for n in numbers],
        outvars=[eqn.outvars[n] for n in _numbers(needed)],
        params={
            **eqn.params,
            "body_nconsts": sum(own[:of_body]),
            "body_jaxpr": ClosedJaxpr(small, body.consts),
            "cond_jaxpr": ClosedJaxpr(same, condition.consts),
        },
    )
    return made, numbers, _numbers(needed)


def expand_operations(closed: Any) -> Any:
    """Return a program without operations that JAX expands only when it compiles.

    Since JAX 0.12 `jnp.searchsorted` and `jnp.nonzero` are single operations in a trace. An
    analysis knows nothing of them, and their parameters name the mesh of the trace.
    """
    if not getattr(closed.jaxpr, "is_high", False):
        return closed
    return _partial_eval.lower_jaxpr2(closed)
