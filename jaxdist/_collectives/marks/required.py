"""The mark of a value that must be equal on all replicas."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# The analysis runs after the trace is complete, so the requirement is an operation of the trace.
REQUIRE_REPLICATED = Primitive("jaxdist_require_replicated")
REQUIRE_REPLICATED.def_impl(lambda x, **_: x)
REQUIRE_REPLICATED.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(REQUIRE_REPLICATED, lambda ctx, x, **_: [x])
ad.deflinear2(REQUIRE_REPLICATED, lambda ct, *_, **__: [ct])
batching.defvectorized(REQUIRE_REPLICATED)


def require_replicated(array: Any, what: str) -> jax.Array:
    """Return `array`, marked: the analysis of the step must prove it equal on all replicas.

    Args:
        array: A traced value inside a replica.
        what: A description of the value, for the error.
    """
    marked: jax.Array = REQUIRE_REPLICATED.bind(array, what=what)
    return marked
