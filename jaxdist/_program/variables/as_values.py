"""Variables where a value is expected: what `Strategy.reduce` and its like take them for."""

from typing import Any

import jax

from jaxdist._replica import innermost_explicit_frame
from jaxdist._typing import PyTree
from jaxdist._values import Handle, PerReplica, Variable, any_variable


def variables_as_values(value: PyTree) -> PyTree:
    """The same pytree, with the values that its variables have on the replicas in their place."""
    if not any_variable():
        return value
    leaves, treedef = jax.tree.flatten(
        value, is_leaf=lambda x: isinstance(x, (PerReplica, Variable))
    )
    if not any(isinstance(leaf, Variable) for leaf in leaves):
        return value
    return treedef.unflatten(
        [_values_of(leaf) if isinstance(leaf, Variable) else leaf for leaf in leaves]
    )


def _values_of(variable: Variable) -> Any:
    frame = innermost_explicit_frame()
    if frame is None or frame.variables is None:
        return variable.distributed
    own = frame.variables.own_copies().read(variable)
    return Handle(own, frame.strategy.layout) if variable.home.per_replica else own
