"""Call paths around the C++ dispatcher: deleted arrays, steps in flight, NumPy arrays.

See Note [Call paths].
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdist import _compat
from jaxdist._devices import CPU_STEPS
from jaxdist._integers import has_cut_off, list_host_arrays
from jaxdist._program.compile.program import Program
from jaxdist._program.run.call import Call
from jaxdist._values import copy_writable_leaves, list_arrays


def guard_against_deleted(
    dispatch: Callable[..., Any], slow: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a call path that checks for deleted arrays and calls `slow` if it finds any."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _compat.has_deleted(jax.tree.leaves((args, kwargs))):
            return slow(*args, **kwargs)
        return dispatch(*args, **kwargs)

    return call


def must_count(program: Program) -> bool:
    """Whether steps of this program may wait for each other's threads; see `CPU_STEPS`."""
    layout = program.layout
    if layout.platform != "cpu" or len(layout.devices) < 2:
        return False
    # Only collectives wait for other devices. With several logical devices XLA may add some.
    return bool(program.traced_collectives) or layout.num_logical > 1


def count_steps(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call path that waits for a free place first, and counts the step it starts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        CPU_STEPS.make_room()
        results = dispatch(*args, **kwargs)
        CPU_STEPS.count_step(results, list_arrays)
        return results

    return call


def has_host_arrays(call: Call) -> bool:
    """Whether some leaf came from NumPy. Later calls may then pass arrays that can change.

    NumPy scalars count too: JAX's call path does not tell them from arrays without dims.
    """
    return any(isinstance(x, (np.ndarray, np.generic)) for x in call.leaves)


def copy_host_arrays(dispatch: Callable[..., Any], slow: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call path that passes copies of writable NumPy arrays.

    It calls `slow`, which raises, if JAX would truncate integers.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        host = list_host_arrays((args, kwargs))
        if has_cut_off(host):
            return slow(*args, **kwargs)
        if host:
            args, kwargs = copy_writable_leaves((args, kwargs))
        return dispatch(*args, **kwargs)

    return call


def convert_arguments(
    dispatch: Callable[..., Any], convert: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a call path that passes `convert((args, kwargs))`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = convert((args, kwargs))
        return dispatch(*args, **kwargs)

    return call
