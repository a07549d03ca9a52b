"""Conditionals of loops that are made from a table, with a note how often they run.

Note [Branches that run in a part of the iterations]:
    The text of a compiled program says how often a loop runs, and not in which of its iterations a
    conditional takes which branch. Where jaxdist makes a loop from a table, it knows. It writes the
    part of the iterations into the scope of the conditional, and XLA keeps the names of scopes.
"""

import fractions
import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax

T = TypeVar("T")

# Only the conditional itself: those in its branches have more names after these.
_TAKEN = re.compile(r"/taken_(\d+)_of_(\d+)/cond$")


def cond_in_part(
    part: fractions.Fraction,
    predicate: Any,
    run: Callable[..., T],
    otherwise: Callable[..., T],
    *operands: Any,
) -> T:
    """Return `jax.lax.cond(predicate, run, otherwise, *operands)`, with a note.

    Args:
        part: The part of the iterations of the loop around it in which a device takes `run`. With
            0 there is no conditional.
        predicate: Whether `run` runs.
        run: The branch that has the work.
        otherwise: The other branch.
        *operands: The operands of both.
    """
    if not part:
        return otherwise(*operands)
    with jax.named_scope(f"taken_{part.numerator}_of_{part.denominator}"):
        result: T = jax.lax.cond(predicate, run, otherwise, *operands)
        return result


def find_part(op_name: str) -> fractions.Fraction:
    """Return the part of the iterations in which a conditional of this name runs; 1 without it."""
    found = _TAKEN.search(op_name)
    return fractions.Fraction(int(found[1]), int(found[2])) if found else fractions.Fraction(1)
