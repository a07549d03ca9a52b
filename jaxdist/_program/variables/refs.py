"""Refs of a trace, turned into values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist.errors import ContextError


def without_refs(traced: Any, names: Sequence[str]) -> Any:
    """The same trace with what is read from and written to refs passed on as values.

    Raises:
        ContextError: A variable is changed where it would be changed twice, or where what is read
            would stay as it was.
    """
    if _changes_when_recomputed(traced.jaxpr):
        raise ContextError(
            f"A step assigns variables inside jax.checkpoint (remat), under jax.grad; it assigns "
            f"{list(names)[:5]}.\n\n"
            "What jax.checkpoint wraps is computed again for the gradient, so the assignment would "
            "be done twice, and the gradient would be taken at the new value.\n\n"
            "Return the new value from the wrapped function (jax.value_and_grad(..., "
            "has_aux=True)) and assign it outside."
        )
    if _decides_while_changing(traced.jaxpr):
        raise ContextError(
            "A step has a while_loop whose condition reads a variable that its body changes; it "
            f"assigns {list(names)[:5]}.\n\n"
            "JAX gives the condition a copy of the variable from before the loop, so the loop "
            "might never end.\n\n"
            "Carry the value in the state of the loop, and assign the variable after it."
        )
    return dataclasses.replace(traced, closed=_compat.without_refs(traced.closed))


def _changes_when_recomputed(jaxpr: Any) -> bool:
    """Whether something that is computed again for a gradient gets a ref."""
    return any(
        (e.params.get("differentiated") and any(_compat.is_ref(v) for v in e.invars))
        or any(_changes_when_recomputed(s) for s in subprograms(e))
        for e in open_jaxpr(jaxpr).eqns
    )


def _decides_while_changing(jaxpr: Any) -> bool:
    """Whether a `while` has one ref in its condition and, changed, in its body."""
    for e in open_jaxpr(jaxpr).eqns:
        if e.primitive.name == "while":
            first, second = e.params["cond_nconsts"], e.params["body_nconsts"]
            asked = {v for v in e.invars[:first] if _is_ref(v)}
            inner = open_jaxpr(e.params["body_jaxpr"])
            given = zip(e.invars[first : first + second], inner.invars, strict=False)
            if any(v in asked and _compat.is_changed(inner, w) for v, w in given if _is_ref(v)):
                return True
        if any(_decides_while_changing(s) for s in subprograms(e)):
            return True
    return False


def _is_ref(atom: Any) -> bool:
    return not isinstance(atom, Literal) and _compat.is_ref(atom)
