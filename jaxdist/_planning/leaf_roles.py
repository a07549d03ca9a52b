"""Finds the role of each input of a step: parameters, optimizer, other state, or batch."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._program import Signature
from jaxdist._values import Kind, is_optax_state


class Role(enum.Enum):
    """The role of an input in training. The values are fields of `SlicePlan.memory`."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    OTHER = "other_state"
    BATCH = "batch"


def get_roles(signature: Signature) -> tuple[Role, ...]:
    """Return the role of each traced input, in order.

    The type of an NNX variable gives its role. Among other arguments, per-replica values are the
    batch, arrays in an optax state belong to the optimizer, and other floats are parameters.
    """
    graph = signature.graph
    found: list[Role] = []
    if graph is not None:
        found = [_get_variable_role(t, p) for t, p in zip(graph.types, graph.paths, strict=True)]
    # The inputs begin with the variables of the NNX objects; the arguments follow.
    of_optax = _find_optax_numbers(signature)
    for number, slot in enumerate(signature.inputs[len(found) :]):
        if slot.kind is Kind.PER_REPLICA:
            found.append(Role.BATCH)
        elif number in of_optax:
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
    """Return the numbers of the traced arguments that are inside a named tuple of optax."""
    slots = [s if isinstance(s, int) else -1 for s in signature.slots]
    whole = jax.tree.unflatten(signature.treedef, slots)
    states = [x for x in jax.tree.leaves(whole, is_leaf=is_optax_state) if is_optax_state(x)]
    return {number for number in jax.tree.leaves(states) if number >= 0}
