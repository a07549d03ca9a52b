"""Variables in the place of values, as arguments of `Strategy.reduce`, `gather` and the like."""

from typing import Any

import jax

from jaxdist._replica import innermost_explicit_frame
from jaxdist._typing import PyTree
from jaxdist._values import Handle, PerReplica, Variable, any_variable


def variables_as_values(value: PyTree) -> PyTree:
    """Return the same pytree with each variable replaced by its values on the replicas."""
    # Most programs have no variables: do not flatten then.
    if not any_variable():
        return value
    leaves, treedef = jax.tree.flatten(
        value, is_leaf=lambda x: isinstance(x, (PerReplica, Variable))
    )
    if not any(isinstance(leaf, Variable) for leaf in leaves):
        return value
    return treedef.unflatten(
        [_value_on_replicas(leaf) if isinstance(leaf, Variable) else leaf for leaf in leaves]
    )


def _value_on_replicas(variable: Variable) -> Any:
    frame = innermost_explicit_frame()
    if frame is None or frame.variables is None:
        return variable.distributed
    # In a merge function `read` would aggregate the copies; `reduce` must see each of them.
    own = frame.variables.own_copies().read(variable)
    return Handle(own, frame.strategy.layout) if variable.home.per_replica else own
