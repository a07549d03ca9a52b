"""One primitive for a whole all-reduce, whatever operations it consists of.

# Note [One all-reduce primitive]
An all-reduce of jaxdist may consist of many permutes, copies and barriers. It is bound as one
call-like primitive that holds this program and its plan, for three reasons:
- Its transpose is the same all-reduce. JAX would otherwise transpose the parts: the messages would
  run backwards, and the gradient would have twice the code.
- The results carry the mark of `assume_replicated`, so the replication analysis knows that they are
  equal on all replicas. It could not prove that from permutes.
- `explain` finds the plan in the traced program.
A plain `psum` is not wrapped: JAX already has its rules, and the primitive takes time to trace.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.replicated import assume_replicated

Summing = Callable[[list[jax.Array]], Sequence[jax.Array]]


# Its derivative is itself: the gradient of a sum over the replicas is the sum of their gradients.
# See Note [One all-reduce primitive].
ALL_REDUCE = Primitive("jaxdist_all_reduce")
ALL_REDUCE.multiple_results = True


def bind_all_reduce(
    arrays: Sequence[jax.Array], plan: AllReducePlan, how: Summing
) -> list[jax.Array]:
    """Return `how(arrays)`, the sums over all replicas, as one primitive.

    Args:
        arrays: The values of this replica.
        plan: A description of `how`.
        how: The sum. It returns the same bits on every replica, in the shapes and dtypes of
            `arrays`. It is a parameter of the primitive, so two that do the same compare equal.
    """
    results: list[Any] = [None] * len(arrays)
    # Only floats and complex numbers have derivatives. Integers have cotangents of dtype float0,
    # which cannot be all-reduced, so they are in a primitive of their own.
    for part in (True, False):
        chosen = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact) is part]
        if chosen:
            sums = _bind([arrays[i] for i in chosen], plan, how)
            for i, total in zip(chosen, sums, strict=True):
                results[i] = total
    return results


def _bind(arrays: Sequence[Any], plan: AllReducePlan, how: Summing) -> list[Any]:
    """Trace `how`, and bind the primitive."""

    def sum_and_mark(*given: jax.Array) -> list[jax.Array]:
        return [assume_replicated(x) for x in how(list(given))]

    program = jax.make_jaxpr(sum_and_mark)(*arrays)
    return ALL_REDUCE.bind(*arrays, program=program, plan=plan, how=how)


def _evaluate(*arrays: Any, program: Any, plan: AllReducePlan, how: Summing) -> list[Any]:
    """Run the program of the primitive."""
    return jaxpr_as_fun(program)(*arrays)


def _shapes(*arrays: Any, program: Any, plan: AllReducePlan, how: Summing) -> list[Any]:
    """Return the shapes and dtypes of the results."""
    return program.out_avals


def _transpose(
    cotangents: Sequence[Any], *_: Any, program: Any, plan: AllReducePlan, how: Summing
) -> list[Any]:
    """Return the all-reduce of the cotangents."""
    # All replicas must reach the same collective, so symbolic zeros become arrays.
    return _bind([ad.instantiate_zeros(c) for c in cotangents], plan, how)


def _batch(
    arrays: Sequence[Any], dims: Sequence[Any], program: Any, plan: AllReducePlan, how: Summing
) -> tuple[list[Any], list[int]]:
    """Return the all-reduce with the mapped dim first."""
    pairs = list(zip(arrays, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    # Every operand gets the mapped dim, because one program sums all of them.
    rows = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in pairs
    ]
    return _bind(rows, plan, how), [0] * len(rows)


ALL_REDUCE.def_impl(_evaluate)
ALL_REDUCE.def_abstract_eval(_shapes)
mlir.register_lowering(ALL_REDUCE, mlir.lower_fun(_evaluate, multiple_results=True))
ad.deflinear2(ALL_REDUCE, _transpose)
batching.primitive_batchers[ALL_REDUCE] = _batch
