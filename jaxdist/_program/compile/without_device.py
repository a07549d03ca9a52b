"""Checks that a program compiled for another process does not call into Python."""

from typing import Any

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist.errors import DeviceError, UnsupportedError

_INSTEAD = {
    "debug_callback": "jax.debug.print or jax.debug.callback",
    "debug_print": "jax.debug.print",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}


def check_needs_no_device(name: str, program: Any, layout: ReplicaMesh) -> None:
    """Raise if a step calls back into Python, which JAX cannot compile for described GPUs.

    Raises:
        DeviceError: The step calls back into Python.
    """
    if not layout.is_described_gpu:
        return
    found = _find_callback(program)
    if found:
        raise DeviceError(
            f"{name} cannot be compiled for {layout.described!r}: it calls {found}.\n\n"
            "JAX binds such a call to a process with a GPU, and a description has none "
            "(https://github.com/jax-ml/jax/issues/28376).\n\n"
            "For the plan, leave the call out: return the value from the step, or put the call "
            "under a Python condition, such as `if debug:`. Nothing else of the program changes, "
            "so memory and work are those of the step without it."
        )


def check_can_be_saved(name: str, program: Any, layout: ReplicaMesh) -> None:
    """Raise if another process could not run the compiled step.

    Raises:
        UnsupportedError: The step calls back into Python, or is for GPUs that are only described.
    """
    if layout.is_described_gpu:
        raise UnsupportedError(
            f"{name} cannot be saved for {layout.described!r}.\n\n"
            "XLA chooses kernels for GPUs by running them, so what is compiled without a GPU is "
            "slower than what the GPU's own process compiles.\n\n"
            "Save it there: strategy.lower(step, args).compile().save(path)."
        )
    found = _find_callback(program)
    if found:
        raise UnsupportedError(
            f"{name} cannot be saved: it calls {found}.\n\n"
            "A saved program runs in another process, which does not have the Python function."
            "\n\nLeave the call out: return the value from the step, or put the call under a "
            "Python condition, such as `if debug:`."
        )


def _find_callback(program: Any) -> str:
    """Return which function of JAX calls back into Python, and the line; '' if none does."""
    for eqn in iterate_equations(program):
        if eqn.primitive.name in _INSTEAD:
            return f"{_INSTEAD[eqn.primitive.name]} at {_compat.find_source(eqn)}"
    return ""
