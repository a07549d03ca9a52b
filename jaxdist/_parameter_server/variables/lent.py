"""`Lent`: lends the value of a variable on a server to NNX objects, and takes it back."""

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from jaxdist.errors import ContextError, UnsupportedError


class Lent:
    """Methods of `ServerVariable`; see Note [Distant values]."""

    __slots__ = ()

    _label: str
    # The array that was lent last, as long as it exists.
    _lent: Callable[[], Any]
    value: Callable[[], Any]

    def lend(self) -> Any:
        """Return the value for an NNX variable that holds this one."""
        value = self.value()
        self._lent = weakref.ref(value)
        return value

    def take_back(self, value: Any) -> None:
        """Check what a transformation writes back into an NNX variable that holds this one.

        Raises:
            ContextError: It is not the value that was lent.
        """
        lent = self._lent()
        if value is lent or _has_equal_bytes(value, lent):
            return
        raise ContextError(
            f"Variable {self._label!r} of a parameter server was changed or donated in nnx.jit, "
            "nnx.grad or another transformation of Flax, or in a function that no worker runs.\n\n"
            "Such a function gets a copy of the value. What it writes back would replace "
            "what workers changed in the meantime, so it only reads.\n\n"
            "Use strategy.run(step, args) or coordinator.schedule(step, args) with the model among "
            "args; they may contain transformations. Or use a copy: nnx.clone(model)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"Variable {self._label!r} of a parameter server was pickled.\n\n"
            "Its value is on a server, which belongs to this job.\n\n"
            "Pickle the value, variable.numpy(), or write it with training.Checkpoints."
        )


def _has_equal_bytes(value: Any, lent: Any) -> bool:
    for array in (value, lent):
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            return False
        if array.is_deleted():
            return False
    if (value.shape, value.dtype) != (lent.shape, lent.dtype):
        return False
    return np.asarray(value).tobytes() == np.asarray(lent).tobytes()
