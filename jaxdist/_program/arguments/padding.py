"""A search for arrays whose padding JAX would remove; see Note [Padding in nodes]."""

from typing import Any

import jax

from jaxdist._program.arguments.arguments import is_unit
from jaxdist._values import Sharded


def has_padding(tree: Any) -> bool:
    """Whether JAX's call path would remove the padding of some array of a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_unit)
    return any(isinstance(x, Sharded) and x.has_padding for x in leaves)
