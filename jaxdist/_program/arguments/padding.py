"""A call path that hands padded arrays over as they are held; see Note [Padding in nodes]."""

from collections.abc import Callable
from typing import Any

import jax

from jaxdist._program.arguments.arguments import is_unit
from jaxdist._values import Sharded, as_held


def has_padding(tree: Any) -> bool:
    """Whether some array of a pytree loses its padding on JAX's call path."""
    leaves = jax.tree.leaves(tree, is_leaf=is_unit)
    return any(isinstance(x, Sharded) and x.has_padding for x in leaves)


def keeping_padding(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A call path that knows arrays in pieces as they are held."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_held((args, kwargs))
        return dispatch(*args, **kwargs)

    return call
