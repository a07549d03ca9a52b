"""`FlatResult`: a result with variables, as `jax.jit` can return it."""

import dataclasses
from typing import Any

import jax

from jaxdist._program.arguments.arguments import VariableItself


@dataclasses.dataclass(frozen=True, slots=True)
class FlatResult:
    """The arrays of a result that contains variables, and its structure.

    From the second call on, JAX flattens a result to learn its structure. A variable is a pytree
    with one leaf, its value, which is not a result of the program.
    """

    arrays: tuple[Any, ...]
    structure: Any

    def open(self) -> Any:
        """Return the result as the function returned it."""
        return self.structure.unflatten(self.arrays)


jax.tree_util.register_pytree_node(
    FlatResult, lambda r: (r.arrays, r.structure), lambda s, arrays: FlatResult(tuple(arrays), s)
)


def flatten_with_variables(result: Any) -> Any:
    """Return a `FlatResult` if a checked result contains variables; else the result itself."""
    leaves = jax.tree.leaves(result, is_leaf=_is_variable)
    if not any(map(_is_variable, leaves)):
        return result
    arrays, structure = jax.tree.flatten(result)
    return FlatResult(tuple(arrays), structure)


def _is_variable(x: Any) -> bool:
    return isinstance(x, VariableItself)
