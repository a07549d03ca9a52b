"""NNX variables that hold a pytree node instead of an array, as sharded parameters do.

Flax passes what is in the slot of a variable to JAX where a function takes the variable itself
(`jnp.matmul(x, kernel)`), and writes `kernel[...] = array` into it. A node can do neither.
"""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx.training import optimizer

# What the slot of a variable holds after `variable[index] = value`; the index may be `...`.
Assign = Callable[[Any, Any, Any], Any]
# Makes a node from the `nnx.State` that Flax made from it; returns anything else unchanged.
Restore = Callable[[Any], Any]

# By the class of a node.
_KNOWN: dict[type[Any], tuple[Assign, Restore]] = {}


def let_variables_hold(kind: type[Any], assign: Assign, restore: Restore) -> None:
    """Let NNX variables that hold a node of this class be used as arrays, and assigned.

    Waits for Flax to look at what is in the slot of a variable.

    Args:
        kind: The class, whose nodes have `__jax_array__`.
        assign: Takes a node, a value and an index; returns what the variable then holds.
        restore: Makes a node from the `nnx.State` with which `nnx.Optimizer.update` replaces it.
    """
    _install()
    _KNOWN[kind] = assign, restore


@functools.cache
def _install() -> None:
    kind: Any = nnx.Variable
    as_array, set_value = kind.__jax_array__, kind.set_value

    @functools.wraps(as_array)
    def unwrap(self: Any) -> Any:
        value = as_array(self)
        return value.__jax_array__() if type(value) in _KNOWN else value

    @functools.wraps(set_value)
    def assign(self: Any, value: Any, **index: Any) -> None:
        held = self.get_raw_value()
        write, _ = _KNOWN.get(type(held), (None, None))
        # An optimizer replaces its state as a whole, whatever that was.
        if write is not None and not isinstance(self, optimizer.OptState):
            if index or getattr(value, "shape", None) == held.shape:
                value = write(held, value, index.get("index", ...))
                index = {}
        set_value(self, value, **index)

    of_optimizer: Any = nnx.Optimizer
    update = of_optimizer.update

    @functools.wraps(update)
    def update_and_restore(self: Any, *args: Any, **kwargs: Any) -> Any:
        updates = update(self, *args, **kwargs)
        # A later update in the same step takes the nodes.
        for _, variable in nnx.iter_graph(self.opt_state):
            if isinstance(variable, nnx.Variable) and type(variable.get_raw_value()) is nnx.State:
                for _, restore in _KNOWN.values():
                    variable.set_raw_value(restore(variable.get_raw_value()))
        return updates

    kind.__jax_array__, kind.set_value = unwrap, assign
    of_optimizer.update = update_and_restore
