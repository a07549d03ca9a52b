"""A check for assignments to Flax variables in dicts and lists, which would be lost."""

from typing import Any

import jax
from flax import nnx

from jaxdist._program.arguments.arguments import argument_name
from jaxdist._values import Sharded
from jaxdist.errors import ArgumentTypeError

Found = list[tuple[str, nnx.Variable[Any], Any]]


def find_bare_variables(args: Any, kwargs: Any) -> Found:
    """Return name, variable and value of each variable that is in no module and no `nnx.State`."""
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_whole)[0]
    return [
        (argument_name(path), leaf, leaf.get_raw_value())
        for path, leaf in leaves
        if isinstance(leaf, nnx.Variable)
    ]


def check_no_write_is_lost(found: Found, result: Any) -> None:
    """Raise if a step assigned such a variable and does not return the new value.

    Raises:
        ArgumentTypeError: JAX passed a copy of the variable to the step, so the caller's variable
            would not change.
    """
    written = [(n, v) for n, v, before in found if v.get_raw_value() is not before]
    if not written:
        return
    returned = {id(x) for x in jax.tree.leaves(result)}
    for name, variable in written:
        if id(variable.get_raw_value()) not in returned:
            kind = type(variable).__name__
            raise ArgumentTypeError(
                f"The step wrote to {name}, a {kind} in a container, and did not return it.\n\n"
                "JAX takes such a variable for its value: the step had another object in its "
                "place, and what it wrote would be lost.\n\n"
                "Pass the module that holds it, or nnx.Dict(value=variable); or return the value."
            )


def _is_whole(x: Any) -> bool:
    return isinstance(x, (nnx.Variable, nnx.State, nnx.Pytree, Sharded))
