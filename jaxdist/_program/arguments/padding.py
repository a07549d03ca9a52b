"""A call path that passes padded arrays with their padding; see Note [Padding in nodes]."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdist._program.arguments.arguments import is_unit
from jaxdist._values import Sharded, as_held


def has_padding(tree: Any) -> bool:
    """Whether JAX's call path would remove the padding of some array of a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_unit)
    return any(isinstance(x, Sharded) and x.has_padding for x in leaves)


def keep_padding(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call path that replaces each `Sharded` array by its padded array first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # JAX flattens the arguments and would slice the padding off: a copy at every call.
        args, kwargs = as_held((args, kwargs))
        return dispatch(*args, **kwargs)

    return call
