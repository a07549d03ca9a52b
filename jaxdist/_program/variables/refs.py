"""Removal of `jax.Ref`s from a trace; see Note [Lifted variables]."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs.control_flow import While
from jaxdist._program.jaxprs.subprograms import iterate_equations, open_jaxpr
from jaxdist.errors import ContextError


def remove_refs(traced: Any, names: Sequence[str]) -> Any:
    """Return the same trace with refs replaced by values that operations take and return.

    Raises:
        ContextError: A variable would be changed twice, or an operation would read an old value.
    """
    if _has_recomputed_refs(traced.jaxpr):
        raise ContextError(
            f"A step assigns variables inside jax.checkpoint (remat), under jax.grad; it assigns "
            f"{list(names)[:5]}.\n\n"
            "What jax.checkpoint wraps is computed again for the gradient, so the assignment would "
            "be done twice, and the gradient would be taken at the new value.\n\n"
            "Return the new value from the wrapped function (jax.value_and_grad(..., "
            "has_aux=True)) and assign it outside."
        )
    if _has_changing_condition(traced.jaxpr):
        raise ContextError(
            "A step has a while_loop whose condition reads a variable that its body changes; it "
            f"assigns {list(names)[:5]}.\n\n"
            "JAX gives the condition a copy of the variable from before the loop, so the loop "
            "might never end.\n\n"
            "Carry the value in the state of the loop, and assign the variable after it."
        )
    return dataclasses.replace(traced, closed=_compat.discharge_refs(traced.closed))


def _has_recomputed_refs(jaxpr: Any) -> bool:
    """Whether an operation that is recomputed for a gradient takes a ref."""
    return any(
        e.params.get("differentiated") and any(_compat.is_ref(v) for v in e.invars)
        for e in iterate_equations(jaxpr)
    )


def _has_changing_condition(jaxpr: Any) -> bool:
    """Whether a `while` reads a ref in its condition and changes it in its body."""
    for e in iterate_equations(jaxpr):
        # A `while` has two lists of constants, so one ref may be in both, as different inputs.
        if e.primitive.name == "while":
            loop = While.of(e.params)
            of_condition, of_body, _ = loop.split(e.invars)
            inner = open_jaxpr(loop.body)
            # Not strict: the inputs of the body also contain the carried values.
            given = [p for p in zip(of_body, inner.invars, strict=False) if _is_ref(p[0])]
            if any(v in of_condition and _compat.has_write_to(inner, w) for v, w in given):
                return True
    return False


def _is_ref(atom: Any) -> bool:
    return not isinstance(atom, Literal) and _compat.is_ref(atom)
