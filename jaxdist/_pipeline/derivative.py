"""A loss whose forward rule computes the gradients: the schedule of a pipeline runs once."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist._called import name_call
from jaxdist._pipeline.inputs import as_array, can_have_gradient
from jaxdist.errors import UnsupportedError

# Of all leaves: the loss or (loss, aux), and for each wanted leaf its gradient, else None.
Gradients = Callable[[Sequence[bool], list[Any]], tuple[Any, list[Any]]]


def attach_gradients(
    value: Callable[[list[Any]], Any], gradients: Gradients, leaves: list[Any]
) -> Any:
    """Return `value(leaves)`, whose derivative is what `gradients` returns.

    Args:
        value: The loss, or `(loss, aux)`. What depends on aux has no derivative, and is refused.
        gradients: Returns the loss, and its gradients by the leaves that are wanted, in any dtype.
        leaves: What the loss depends on.
    """
    caller = name_call()

    @jax.custom_vjp
    def loss(leaves: list[Any]) -> Any:
        return value(leaves)

    def forward(given: list[Any]) -> tuple[Any, list[Any]]:
        # A leaf that is not differentiated, such as a frozen parameter or the batch, costs nothing.
        wanted = [bool(g.perturbed) and can_have_gradient(g.value.dtype) for g in given]
        # A Python number that is differentiated comes as a number.
        values = [as_array(g.value) for g in given]
        return _differentiate_once(lambda leaves: gradients(wanted, leaves), values, caller)

    def backward(found: list[Any], cotangent: Any) -> tuple[list[Any]]:
        if isinstance(cotangent, tuple):
            cotangent, of_aux = cotangent
            _refuse_aux(of_aux, caller)
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            return ([None for _ in found],)
        # The factor is applied to the sums, before they are rounded to the dtype of a parameter.
        return (
            [
                None if g is None else (g * cotangent).astype(leaf.dtype)
                for g, leaf in zip(found, leaves, strict=True)
            ],
        )

    loss.defvjp(forward, backward, symbolic_zeros=True)
    return loss(leaves)


def _refuse_aux(cotangents: Any, caller: str) -> None:
    zero = jax.custom_derivatives.SymbolicZero
    leaves = jax.tree.leaves(cotangents, is_leaf=lambda g: isinstance(g, zero))
    if all(isinstance(g, zero) or g.dtype == jax.dtypes.float0 for g in leaves):
        return
    raise UnsupportedError(
        f"aux of {caller} was differentiated.\n\n"
        "The backward of a micro-batch begins before the step gets aux, so its gradients are those "
        "of the loss only.\n\n"
        "Add to the loss in head, or use jax.lax.stop_gradient(aux)."
    )


def _differentiate_once(fn: Callable[[list[Any]], Any], values: list[Any], caller: str) -> Any:
    """Return `fn(values)`, which refuses to be differentiated again."""

    @jax.custom_jvp
    def once(values: list[Any]) -> Any:
        return fn(values)

    @once.defjvp
    def refuse_second(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(
            f"{caller} was differentiated twice.\n\n"
            "Its gradients are computed by a schedule of the pipeline, which has no derivative of "
            "its own.\n\n"
            "Compute second derivatives with the loop over the layers that it replaces."
        )

    return once(values)
