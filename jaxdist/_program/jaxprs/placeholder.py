"""A primitive for values that become inputs of a program only after it has been traced."""

from typing import Any

import jax
from jax.extend.core import Primitive

from jaxdist import _compat

PLACEHOLDER = Primitive("jaxdist_placeholder")
PLACEHOLDER.def_abstract_eval(
    lambda *, number, shape, dtype, weak_type: jax.core.ShapedArray(
        shape, dtype, weak_type=weak_type
    )
)


def placeholder(
    trace: Any, number: int, shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False
) -> Any:
    """Return a traced value of this shape and dtype in the outermost program of a trace.

    Args:
        trace: The trace of that program; the caller may be in a trace inside it.
        number: The number of the placeholder in that trace.
        shape: The shape in the program.
        dtype: The dtype of the value.
        weak_type: Whether JAX treats its dtype as that of a Python number.
    """
    params = {"number": number, "shape": shape, "dtype": dtype, "weak_type": weak_type}
    return _compat.call_in_trace(trace, lambda: PLACEHOLDER.bind(**params))
