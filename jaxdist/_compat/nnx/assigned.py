"""NNX variables that hold a pytree node in place of an array, as parameters in pieces do.

Flax passes what is in the slot of a variable to JAX where a function takes the variable itself
(`jnp.matmul(x, kernel)`), and writes `kernel[...] = array` into it. A node can do neither.
"""

import functools
from typing import Any, Protocol

from flax import nnx
from flax.nnx.training import optimizer


class Node(Protocol):
    """What is in the slot of a variable."""

    def __jax_array__(self) -> Any:
        """Return the array that the node stands for."""
        ...

    def assign(self, value: Any, index: Any) -> Any:
        """Return what the slot holds after `variable[index] = value`; the index may be `...`."""
        ...


class _Known:
    kinds: tuple[type[Any], ...] = ()


def let_variables_hold(kind: type[Node]) -> None:
    """Let NNX variables that hold a node of this class be used as arrays, and assigned.

    Waits for Flax to ask what is in the slot of a variable.
    """
    _install()
    _Known.kinds = (*_Known.kinds, kind)


@functools.cache
def _install() -> None:
    kind: Any = nnx.Variable
    as_array, set_value = kind.__jax_array__, kind.set_value

    @functools.wraps(as_array)
    def unwrap(self: Any) -> Any:
        value = as_array(self)
        return value.__jax_array__() if isinstance(value, _Known.kinds) else value

    @functools.wraps(set_value)
    def assign(self: Any, value: Any, **index: Any) -> None:
        held = self.get_raw_value()
        # An optimizer replaces its state as a whole, whatever that was.
        if isinstance(held, _Known.kinds) and not isinstance(self, optimizer.OptState):
            if index or getattr(value, "shape", None) == held.shape:
                value = held.assign(value, index.get("index", ...))
                index = {}
        set_value(self, value, **index)

    kind.__jax_array__, kind.set_value = unwrap, assign
