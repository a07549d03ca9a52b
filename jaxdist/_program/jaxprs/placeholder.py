"""A value that a trace meets on its way, and that becomes an input of the program afterwards."""

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
    """A traced value of this shape and dtype in the outermost program of a trace.

    Args:
        trace: The trace of that program, which the caller may be deep inside of.
        number: Tells it from the other placeholders of that trace.
        shape: As the program sees it.
        dtype: Of the value.
        weak_type: Whether it is one of Python's numbers to JAX.
    """
    params = {"number": number, "shape": shape, "dtype": dtype, "weak_type": weak_type}
    return _compat.call_in_trace(trace, lambda: PLACEHOLDER.bind(**params))
