"""Equations with some of their results."""

from collections.abc import Collection, Sequence
from typing import Any

from jax._src.interpreters import partial_eval as _partial_eval
from jax.extend.core import ClosedJaxpr


def drop_results(eqn: Any, keep: Collection[int]) -> tuple[Any, list[int], list[int]] | None:
    """Return an equation that computes only some of the results of another one.

    Args:
        eqn: An equation that holds a program: a call, a loop or a branch.
        keep: The numbers of the results to keep.

    Returns:
        The equation, and the numbers of the operands and of the results that it has. It has more
        results than asked for where a loop needs them in its carry. None if the primitive has no
        rule for this, or the equation has effects.
    """
    if eqn.effects:
        return None
    wanted = [n in keep for n in range(len(eqn.outvars))]
    if eqn.primitive.name == "while":
        return _drop_of_while(eqn, wanted)
    rule = _partial_eval.dce_rules.get(eqn.primitive)
    if rule is None:
        return None
    used, made = rule(wanted, eqn)
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
