"""Errors for arguments whose buffers were already donated.

JAX refuses such arguments too, but does not say which ones. JAX 0.10 starts a program on all CPU
devices before it checks, and then the process ends with a signal. There jaxdist checks first.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._program.arguments.arguments import Flat, argument_name
from jaxdist._validate import format_lines
from jaxdist.errors import DonationError


def is_about_deleted(error: Exception) -> bool:
    """Whether an error is JAX's error about a deleted buffer."""
    # JAX has no exception class for it, and its messages for arrays and for buffers differ.
    text = str(error)
    return "has been deleted" in text and ("Array" in text or "Buffer" in text)


def find_deleted_arguments(
    flat: Flat, name_of_state: Callable[[int], str], state: list[Any]
) -> list[str]:
    """Return names, dtypes and shapes of the call's leaves and NNX variables that are deleted."""
    named = [(name_of_state(i), x) for i, x in enumerate(state)]
    for path, slot in zip(flat.paths(), flat.slots, strict=True):
        if isinstance(slot, int):
            named += [(argument_name(path), x) for x in jax.tree.leaves(flat.dynamic[slot])]
    return [f"{n}: {x.dtype}{list(x.shape)}" for n, x in named if _compat.has_deleted([x])]


@called(lambda step: f"strategy.run({step})")
def deleted_arguments_error(step: str, names: list[str], donated: tuple[int, ...]) -> DonationError:
    """Return the error for arguments whose buffers are deleted."""
    numbers = donated or (0,)
    return refuse(
        f"{len(names)} array(s) whose buffers are gone:\n{format_lines(names, 4)}",
        "A step with donate_argnums gives the buffers of those arguments to its results, so they "
        "hold nothing afterwards.",
        "Pass what the step returned: state = strategy.run(step, (state, batch), options). To use "
        "the old arrays again, copy them before (jax.tree.map(jnp.copy, state)), or leave the "
        f"argument out of RunOptions(donate_argnums={numbers}).",
        kind=DonationError,
    )
