"""A call path that first copies NumPy arrays; see Note [Who owns host memory]."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdist._program.run.call import Call
from jaxdist._values import owned_leaves


def has_host_arrays(call: Call) -> bool:
    """Whether some leaf came from NumPy. Later calls may then pass arrays that can change.

    NumPy scalars count too: JAX's call path does not tell them from arrays without dims.
    """
    return any(isinstance(x, (np.ndarray, np.generic)) for x in call.leaves)


def copy_host_arrays(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call path that passes copies of the caller's NumPy arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = owned_leaves((args, kwargs))
        return dispatch(*args, **kwargs)

    return call
