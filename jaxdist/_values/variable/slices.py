"""`VariableSlice`: a part of a variable that can be assigned."""

from typing import Any, final

import jax

from jaxdist._called import called
from jaxdist._values.variable.arguments import get_elements
from jaxdist._values.variable.blocks import BlockChanges
from jaxdist._values.variable.documented import ValueOperators


@final
class VariableSlice(ValueOperators):
    """The result of `variable[index]`: the current elements, with `assign`.

    Operators, `jax.numpy` and JAX's transformations treat it as the array that it holds.

    Example:
        >>> v = Variable([1.0, 2.0, 3.0])
        >>> v[1].assign(5.0).tolist(), float(v[0] + v[1])
        ([1.0, 5.0, 3.0], 6.0)

    Source:
        `tf.Variable.__getitem__`.
    """

    __slots__ = ("_held", "_index", "_variable")

    def __init__(self, variable: BlockChanges, index: Any, held: jax.Array) -> None:
        # Only the index is kept: `assign` computes the indices of the elements when it is called.
        self._variable, self._index, self._held = variable, index, held

    def value(self) -> jax.Array:
        """Return the elements at the time when the slice was made."""
        return self._held

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements."""
        return tuple(self._held.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self._held.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._held.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._held.size

    @called(lambda self: f"Variable {self._variable.label!r}[...][index]")
    def __getitem__(self, index: Any) -> jax.Array:
        return get_elements(self._held, index)

    def assign(self, value: Any, name: str | None = None) -> jax.Array:
        """Replace these elements; the variable changes as by `scatter_nd_update`.

        Args:
            value: An array or number with the shape of the slice; nothing is broadcast.
            name: Without effect; TensorFlow names the operation by it.

        Returns:
            The new value of the whole variable.
        """
        return self._variable._change_elements("update", self._index, value, name)

    def assign_add(self, delta: Any, name: str | None = None) -> jax.Array:
        """Add to these elements; the variable changes as by `scatter_nd_add`."""
        return self._variable._change_elements("add", self._index, delta, name)

    def assign_sub(self, delta: Any, name: str | None = None) -> jax.Array:
        """Subtract from these elements; the variable changes as by `scatter_nd_sub`."""
        return self._variable._change_elements("sub", self._index, delta, name)

    def __repr__(self) -> str:
        return repr(self._held)

    def __format__(self, spec: str) -> str:
        return format(self._held, spec)


# Functions of JAX get its array, and what they rebuild is an array, not a slice.
jax.tree_util.register_pytree_with_keys(
    VariableSlice,
    lambda s: (((jax.tree_util.GetAttrKey("value"), s.value()),), None),
    lambda _, values: next(iter(values)),
)
