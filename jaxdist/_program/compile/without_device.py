"""What a program must not contain if it is compiled for GPUs that are only described."""

from typing import Any

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist.errors import DeviceError

_INSTEAD = {
    "debug_callback": "jax.debug.print or jax.debug.callback",
    "debug_print": "jax.debug.print",
    "pure_callback": "jax.pure_callback",
    "io_callback": "jax.experimental.io_callback",
}


def check_needs_no_device(name: str, program: Any, layout: ReplicaMesh) -> None:
    """Raise if a step calls back into Python, which JAX cannot compile for described GPUs.

    Raises:
        DeviceError: It does.
    """
    if not layout.is_described_gpu:
        return
    for eqn in iterate_equations(program):
        kind = eqn.primitive.name
        if kind not in _INSTEAD:
            continue
        raise DeviceError(
            f"{name} cannot be compiled for {layout.described!r}: it calls {_INSTEAD[kind]} at "
            f"{_compat.find_source(eqn)}.\n\n"
            "JAX binds such a call to a process with a GPU, and a description has none "
            "(https://github.com/jax-ml/jax/issues/28376).\n\n"
            "For the plan, leave the call out: return the value from the step, or put the call "
            "under a Python condition, such as `if debug:`. Nothing else of the program changes, "
            "so memory and work are those of the step without it."
        )
