"""The mark that says: this value is the same on all replicas."""

from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist._validate import as_arrays, shown
from jaxdist._values import PerReplica
from jaxdist.errors import ArgumentTypeError

T = TypeVar("T")

ASSUME_REPLICATED = Primitive("jaxdist_assume_replicated")
ASSUME_REPLICATED.def_impl(lambda x: x)
ASSUME_REPLICATED.def_abstract_eval(lambda x: x)
mlir.register_lowering(ASSUME_REPLICATED, lambda ctx, x: [x])
# The derivative is the identity without the mark: a tangent or cotangent need not be the same on
# all replicas because the value is.
ad.deflinear2(ASSUME_REPLICATED, lambda ct, _: [ct])
batching.defvectorized(ASSUME_REPLICATED)


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, PerReplica)


def assume_replicated(value: T) -> T:
    """Promise that `value` is the same on all replicas, where that cannot be proved.

    The result of `Strategy.run` then has it as a plain array instead of a `PerReplica`. The
    promise is not checked: replicas that differ keep their own value under one name, and
    `check_replicas` is how to find out. A rule that the analysis does not know (a callback, a
    custom kernel) is what it is for.

    Shapes:
        As they are.

    Cost:
        None; it leaves nothing in the compiled program.

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

    if any(isinstance(x, PerReplica) for x in jax.tree.leaves(value, is_leaf=_is_per_replica)):
        raise ArgumentTypeError(
            f"assume_replicated was given value={shown(value)}.\n\n"
            "Inside a replica there is only its own value.\n\n"
            "Pass what the step was given: strategy.run(fn, args=(value,))."
        )
    marked: T = jax.tree.map(ASSUME_REPLICATED.bind, as_arrays("assume_replicated", "value", value))
    return marked
