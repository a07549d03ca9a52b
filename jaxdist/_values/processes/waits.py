"""Computations outside of steps for which the processes of a job wait for each other."""

from collections.abc import Callable

import jax

from jaxdist import _compat, _processes
from jaxdist._mesh import ReplicaMesh

_CALLS: "dict[str, _processes.CallOfAll]" = {}


def compute_together(call: str, layout: ReplicaMesh, compute: Callable[[], jax.Array]) -> jax.Array:
    """Return what all processes compute together; wait for it if the mesh has a time limit.

    Args:
        call: The user's call, for errors and reports.
        layout: The mesh of the strategy.
        compute: The computation. In a trace, and on a mesh of one process, it is just called.

    Raises:
        DeadlineExceededError: Another process did not arrive within the limit of the mesh.
        UnavailableError: Another process has ended.
    """
    if not layout.is_shared or _compat.is_inside_trace():
        return compute()
    place = _CALLS.setdefault(call, _processes.CallOfAll(call)).name_next()
    seconds = layout.timeout_seconds
    with _processes.Waiter(call, place, seconds) as waiter:
        result = compute()
        if seconds is not None:
            waiter.wait([result])
    return result
