"""The marks of values that are equal on all replicas: by promise, or by requirement."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist._called import called, refuse_type
from jaxdist._validate import as_arrays, show
from jaxdist._values import is_per_replica

T = TypeVar("T")


def make_mark(
    name: str, transpose: Callable[..., list[Any]] = lambda cotangent, *_, **__: [cotangent]
) -> Primitive:
    """Return a primitive that marks a value in a trace, and does not change it."""
    mark = Primitive(name)
    mark.def_impl(lambda x, **_: x)
    mark.def_abstract_eval(lambda x, **_: x)
    # The compiled program does not have the mark.
    mlir.register_lowering(mark, lambda _, x, **__: [x])
    ad.deflinear2(mark, transpose)
    batching.defvectorized(mark)
    return mark


# The derivatives are the identity, without the mark. A value that is equal on all replicas may have
# tangents and cotangents that differ.
ASSUME_REPLICATED = make_mark("jaxdist_assume_replicated")
# The analysis runs after the trace is complete, so the requirement is an operation of the trace.
REQUIRE_REPLICATED = make_mark("jaxdist_require_replicated")


@called("assume_replicated")
def assume_replicated(value: T) -> T:
    """Promise that `value` is the same on all replicas, where that cannot be proved.

    `Strategy.run` then returns it as a plain array instead of a `PerReplica`. jaxdist does not
    check the promise: if the replicas differ, each keeps its own value. `check_replicas` finds such
    values. The mark is meant for operations that the analysis does not know, such as a callback or
    a custom kernel.

    Shapes:
        Unchanged.

    Cost:
        None: the compiled program does not contain the mark.

    Args:
        value: Pytree of arrays inside a replica.

    Returns:
        The same values.

    Example:
        >>> def step(x):
        ...     same = jax.pure_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), "float32"))
        ...     return assume_replicated(same)
        >>> float(MirroredStrategy().run(step, (1.0,)))
        3.0
    """

    if any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
        raise refuse_type(
            f"value={show(value)}.",
            "Inside a replica there is only its own value.",
            "Pass what the step was given: strategy.run(fn, args=(value,)).",
        )
    return jax.tree.map(ASSUME_REPLICATED.bind, as_arrays("value", value))


def require_replicated(array: Any, what: str) -> jax.Array:
    """Return `array`, marked: the analysis of the step must prove it equal on all replicas.

    Args:
        array: A traced value inside a replica.
        what: A description of the value, for the error.
    """
    return REQUIRE_REPLICATED.bind(array, what=what)
