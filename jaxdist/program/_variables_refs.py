"""Refs of a trace, turned into values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxdist import _compat
from jaxdist.errors import ContextError
from jaxdist.program._subprograms import subprograms


def without_refs(traced: Any, names: Sequence[str]) -> Any:
    """The same trace with what is read from and written to refs passed on as values.

    Raises:
        ContextError: A variable is changed where it would be changed twice.
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
    return dataclasses.replace(traced, closed=_compat.without_refs(traced.closed))


def _changes_when_recomputed(jaxpr: Any) -> bool:
    """Whether something that is computed again for a gradient gets a ref."""
    return any(
        (e.params.get("differentiated") and any(_compat.is_ref(v) for v in e.invars))
        or any(_changes_when_recomputed(s) for s in subprograms(e))
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )
