"""A step inside another trace: its arguments have no shardings, and nothing is compiled."""

from typing import Any

import jax

from jaxdist._program.compile.program import Program
from jaxdist._program.run.call import Call
from jaxdist._program.variables.lift import LiftedVariables
from jaxdist._program.virtual.limits import not_differentiable
from jaxdist._values import current_binding
from jaxdist.errors import ContextError


def run_inside_trace(call: Call, program: Program) -> Any:
    """Put the program of a call into the enclosing trace.

    Raises:
        ContextError: The step uses variables, but the enclosing function does not track them.
    """
    variables = program.variables
    if variables and current_binding() is None:
        raise ContextError(_no_binding_message(variables))
    is_virtual = program.layout.num_virtual is not None
    inner = not_differentiable(program.call) if is_virtual else program.call
    if program.layout.num_logical > 1:
        # Under `grad` alone, JAX would evaluate the program operation by operation. It cannot do
        # that while some axes are manual and others automatic.
        inner = jax.jit(inner)
    return call.update_state(program, inner(*call.leaves_of(program)))


def _no_binding_message(variables: LiftedVariables) -> str:
    names = [v.label for v in variables.all]
    return (
        f"strategy.run was called inside another function that JAX is tracing (jax.jit, scan, "
        f"grad), and its step uses {len(names)} variable(s): {names[:5]}.\n\n"
        "The traced function would keep the values that they have now, and assignments would be "
        "lost.\n\n"
        "Decorate that function with jaxdist.function instead of jax.jit, or call strategy.run "
        "outside and put what is around it into the step."
    )
