"""One operation that stands for a whole all-reduce, whatever it is made of."""

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
# Going by the derivatives of what it is made of would run the messages backwards, and the
# replicas would no longer be known to get the same.
ALL_REDUCE = Primitive("jaxdist_all_reduce")
ALL_REDUCE.multiple_results = True


def reduced(arrays: Sequence[jax.Array], plan: AllReducePlan, how: Summing) -> list[jax.Array]:
    """`how(arrays)`, the sums over all replicas, as one operation.

    Args:
        arrays: What this replica has.
        plan: What `how` does, in words.
        how: Gives every replica the same bits, in the shapes and dtypes of `arrays`. A value
            like any other parameter of an operation: equal to another one that does the same.
    """
    results: list[Any] = [None] * len(arrays)
    # Derivatives are of floats and complex numbers, so these go by themselves.
    for part in (True, False):
        chosen = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact) is part]
        if chosen:
            sums = _bind([arrays[i] for i in chosen], plan, how)
            for i, total in zip(chosen, sums, strict=True):
                results[i] = total
    return results


def _bind(arrays: Sequence[Any], plan: AllReducePlan, how: Summing) -> list[Any]:
    def summed(*given: jax.Array) -> list[jax.Array]:
        return [assume_replicated(x) for x in how(list(given))]

    program = jax.make_jaxpr(summed)(*arrays)
    sums: list[Any] = ALL_REDUCE.bind(*arrays, program=program, plan=plan, how=how)
    return sums


def _evaluate(*arrays: Any, program: Any, plan: AllReducePlan, how: Summing) -> list[Any]:
    results: list[Any] = jaxpr_as_fun(program)(*arrays)
    return results


def _shapes(*arrays: Any, program: Any, plan: AllReducePlan, how: Summing) -> list[Any]:
    avals: list[Any] = program.out_avals
    return avals


def _transpose(
    cotangents: Sequence[Any], *_: Any, program: Any, plan: AllReducePlan, how: Summing
) -> list[Any]:
    return _bind([ad.instantiate_zeros(c) for c in cotangents], plan, how)


def _batched(
    arrays: Sequence[Any], dims: Sequence[Any], program: Any, plan: AllReducePlan, how: Summing
) -> tuple[list[Any], list[int]]:
    pairs = list(zip(arrays, dims, strict=True))
    size = next(x.shape[d] for x, d in pairs if d is not None)
    rows = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in pairs
    ]
    return _bind(rows, plan, how), [0] * len(rows)


ALL_REDUCE.def_impl(_evaluate)
ALL_REDUCE.def_abstract_eval(_shapes)
mlir.register_lowering(ALL_REDUCE, mlir.lower_fun(_evaluate, multiple_results=True))
ad.deflinear2(ALL_REDUCE, _transpose)
batching.primitive_batchers[ALL_REDUCE] = _batched
