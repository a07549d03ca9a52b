"""What the inputs of a step are: parameters, optimizer state, other state, a batch."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._program import Signature, Static
from jaxdist._values import Kind


class Role(enum.Enum):
    """What an input is to training."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    OTHER = "other_state"
    BATCH = "batch"


def get_roles(signature: Signature) -> tuple[Role, ...]:
    """The role of each traced input, in order.

    Variables of NNX objects say what they are. Of other arguments, what is per-replica is a batch,
    what lies in a state of optax is the optimizer's, and floats are parameters.
    """
    graph = signature.graph
    found: list[Role] = []
    if graph is not None:
        found = [_get_variable_role(t, p) for t, p in zip(graph.types, graph.paths, strict=True)]
    of_optax = _find_optax_numbers(signature)
    traced = [s for s in signature.slots if isinstance(s, int)]
    for number, slot in enumerate(signature.inputs[len(found) :]):
        if slot.kind is Kind.PER_REPLICA:
            found.append(Role.BATCH)
        elif number < len(traced) and number in of_optax:
            found.append(Role.OPTIMIZER)
        else:
            is_float = jnp.issubdtype(slot.dtype, jnp.inexact)
            found.append(Role.PARAMETERS if is_float else Role.OTHER)
    return tuple(found)


def _get_variable_role(kind: type, path: tuple[Any, ...]) -> Role:
    if issubclass(kind, nnx.OptState) or "opt_state" in path:
        return Role.OPTIMIZER
    return Role.PARAMETERS if issubclass(kind, nnx.Param) else Role.OTHER


def _find_optax_numbers(signature: Signature) -> set[int]:
    """Numbers of the traced arguments that lie in a named tuple of optax."""
    slots = [-1 if isinstance(s, Static) or not isinstance(s, int) else s for s in signature.slots]
    whole = jax.tree.unflatten(signature.treedef, slots)
    states = [x for x in jax.tree.leaves(whole, is_leaf=_is_optax_state) if _is_optax_state(x)]
    return {number for number in jax.tree.leaves(states) if number >= 0}


def _is_optax_state(x: Any) -> bool:
    is_tuple = isinstance(x, tuple) and hasattr(x, "_fields")
    return is_tuple and type(x).__module__.split(".")[0] == "optax"
