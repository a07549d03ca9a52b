"""A call path that copies NumPy arrays first; see Note [Who owns host memory]."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist._program.run.call import Call
from jaxdist._values import owned_leaves


def has_host_arrays(call: Call) -> bool:
    """Whether some leaf of a call came from NumPy, so that later calls may bring writable ones.

    To JAX's call path a scalar of NumPy looks like an array without dims, hence both.
    """
    return any(isinstance(x, (np.ndarray, np.generic)) for x in call.leaves)


def owning(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A call path that a caller's arrays do not reach, only copies of them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = owned_leaves((args, kwargs))
        return dispatch(*args, **kwargs)

    return call
