"""Check that no step takes the mean over replicas of a function of a gradient in pieces.

The gradient of a parameter in pieces is already the mean over the replicas. So its square is the
square of the mean, whereas replicated parameters have the mean of the squares.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis
from jaxdist._program.jaxprs.subprograms import iterate_equations
from jaxdist._values import OPEN, PIECE, REDUCED_PIECES
from jaxdist.errors import ShardedArrayError

# Linear in each operand, or in the first one.
_LINEAR = frozenset(
    """
    add add_any broadcast_in_dim concatenate conj convert_element_type copy copy_p device_put
    dynamic_slice dynamic_update_slice imag mesh_cast name neg optimization_barrier pad pcast pvary
    real reduce_precision reduce_sum reshape reshard rev sharding_constraint slice split squeeze
    stack stop_gradient sub transpose unstack zeros_like
    """.split()
)


class Reduced(NamedTuple):
    """The facts about one value; facts are ordered, and a join takes the larger one.

    Args:
        is_mean: Whether it is a gradient that the backward pass has reduced, or linear in one.
        line: Where a nonlinear function was applied to such a gradient; else empty.
    """

    is_mean: bool = False
    line: str = ""


_PLAIN = Reduced()


class ReducedGradients(ForwardAnalysis[Reduced]):
    """The analysis of which values are functions of gradients that are already reduced.

    It ends at a gather: values made of whole arrays have other uses, such as second derivatives.

    Raises:
        ShardedArrayError: From `run`: an all-reduce of such a function.
    """

    of_constants = _PLAIN

    def join(self, eqn: Any, aval: Any, first: Reduced, second: Reduced) -> Reduced:
        return max(first, second)

    def operation(self, eqn: Any, inputs: list[Reduced]) -> list[Reduced]:
        if eqn.primitive is REDUCED_PIECES:
            if inputs[0].line:
                raise ShardedArrayError(_explain(eqn, inputs[0].line))
            return [_PLAIN]
        if eqn.primitive is PIECE:
            return [Reduced(is_mean=eqn.params["divisor"] > 1)]
        largest = max(inputs, default=_PLAIN)
        if eqn.primitive is OPEN or not largest.is_mean:
            return [_PLAIN] * len(eqn.outvars)
        if not largest.line and not _is_linear(eqn, inputs):
            largest = Reduced(True, _compat.find_source(eqn) or eqn.primitive.name)
        return [largest] * len(eqn.outvars)


def check_reduced_gradients(program: Any) -> None:
    """Check a traced step whose arrays have their whole shapes.

    Raises:
        ShardedArrayError: An all-reduce of a function of a gradient in pieces.
    """
    if any(e.primitive is REDUCED_PIECES for e in iterate_equations(program)):
        ReducedGradients().run(program, [_PLAIN] * len(program.invars))


def _is_linear(eqn: Any, inputs: list[Reduced]) -> bool:
    name = eqn.primitive.name
    first, others = inputs[0], inputs[1:]
    if name == "mul":
        return not (first.is_mean and others[0].is_mean)
    if name == "div":
        return not others[0].is_mean
    if name == "select_n":
        return not first.is_mean
    if name == "convert_element_type":
        return bool(jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact))
    return name in _LINEAR


@called("strategy.run")
def _explain(eqn: Any, line: str) -> str:
    aval = eqn.invars[0].aval
    source = _compat.find_source(eqn)
    return (
        f"{name_call()}{f', at {source}' if source else ''}: all_reduce was given an array in "
        f"pieces, {aval.dtype}{list(aval.shape)}, which is a function, at {line}, of a gradient "
        "that was not all-reduced before.\n\n"
        "The gradient of a parameter in pieces is the mean over the replicas already, so this is "
        "the function of the mean. If each replica has the whole parameter, the same line "
        "gives the mean of the function.\n\n"
        "For the function of the mean, all-reduce the gradients first: "
        "replica.all_reduce('mean', grads). For the mean over the replicas, take the gradient "
        "with respect to whole arrays: jax.grad(loss)(jaxdist.partition.gather(params))."
    )
