"""Updates a model in a step whose replicas may have different numbers of examples."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import ReduceOp
from jaxdist._replica import ReplicaContext
from jaxdist._strategies import get_replica_context
from jaxdist._typing import PyTree
from jaxdist._update import REDUCED, ReducingUpdate, mark_wrapper
from jaxdist._validate import (
    as_array,
    check_has_arrays,
    check_instance,
    format_lines,
    show,
)
from jaxdist.errors import ContextError, ShapeError

Sums = TypeVar("Sums")


@called(REDUCED)
def reduce_and_update(
    model: nnx.Module,
    optimizer: "nnx.Optimizer[Any]",
    grads: PyTree,
    count: int | jax.Array,
    sums: Sums,
) -> tuple[jax.Array, Sums]:
    """Update a model in place with the mean gradients over the examples of all replicas.

    Call it inside a replica, with gradients of a *sum* over the replica's examples. The result is
    exact even if replicas have different numbers of examples, or none.

    Shapes:
        In: `grads` as the parameters; `count` `[]`; `sums` any shapes, equal on all replicas.
        Out: `count` and `sums` of all replicas.

    Cost:
        One all-reduce of gradients, `count` and `sums`. With `sharded_update` and
        `compressed_update`, which reduce the gradients themselves, only of `count` and `sums`.

    Args:
        model: A Flax NNX module.
        optimizer: The optimizer of the module.
        grads: The gradients of the sum of the losses over the examples of this replica.
        count: The number of these examples, or the sum of their weights.
        sums: Other sums over these examples, such as the loss; a pytree of arrays.

    Returns:
        The number of examples of all replicas (1 if they have none), and the other sums.

    Raises:
        ContextError: Across replicas.
        ArgumentTypeError: `model` is not an NNX module, `optimizer` is not an `nnx.Optimizer`, or
            `count` is not a number.
        ShapeError: The gradients do not match the parameters.
        ArgumentError: `count` is negative or infinite, or another transformation contains a
            `sharded_update` or `compressed_update` with `reduce_op="sum"`.

    Example:
        >>> strategy = MirroredStrategy()
        >>> with strategy.scope():
        ...     model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
        ...     optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
        >>> def step(model, optimizer, x):
        ...     total, grads = nnx.value_and_grad(lambda m: m(x).sum())(model)
        ...     count, total = training.reduce_and_update(
        ...         model, optimizer, grads, x.shape[0], total)
        ...     return total / count
        >>> before = model.kernel[0, 0]
        >>> x = jax.device_put(np.arange(16.0)[:, None], strategy.per_replica_sharding)
        >>> loss = strategy.run(step, (model, optimizer, x))
        >>> round(float(before - model.kernel[0, 0]), 4)
        7.5

    Source:
        The loss of `tf.nn.compute_average_loss` with the gradient reduction of
        `Optimizer.apply_gradients`.
    """
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            f"{REDUCED} was called across replicas, where no replica has gradients.\n\n"
            "It adds up the gradients of one replica with those of the others.\n\n"
            "Call it inside the function that you pass to strategy.run."
        )
    remedy = "Pass nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
    check_instance("optimizer", optimizer, nnx.Optimizer, "an nnx.Optimizer", remedy)
    what, remedy = "a Flax NNX module", "Pass the module that the optimizer was created for."
    check_instance("model", model, nnx.Module, what, remedy)
    _check_grads(model, optimizer, grads)
    check_has_arrays("sums", sums, "a pytree of arrays")
    total = _as_count(count)
    # These transforms all-reduce the gradients themselves. A second all-reduce would multiply them.
    reduces_itself = isinstance(optimizer.tx, ReducingUpdate)
    if reduces_itself:
        total, sums = _reduce(replica, (total, sums))
    else:
        total, sums, grads = _reduce(replica, (total, sums, grads))
    # If no replica has examples in a step, the gradients must be zero, not 0 / 0.
    divisor = jnp.where(total == 0, 1, total)
    grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
    with _take_sums(optimizer) if reduces_itself else mark_wrapper(REDUCED):
        optimizer.update(model, grads)
    return divisor, sums


@called(f"{REDUCED}, for sums,", replaces="ReplicaContext.all_reduce")
def _reduce(replica: ReplicaContext, values: tuple[Any, ...]) -> Any:
    return replica.all_reduce(ReduceOp.SUM, values)


@contextlib.contextmanager
def _take_sums(optimizer: "nnx.Optimizer[Any]") -> Iterator[None]:
    """Let a transformation that reduces the gradients itself sum them.

    The gradients are already divided by the number of all examples. A mean would divide them again
    by the number of replicas.
    """
    own, update = optimizer.tx, optimizer.tx.update
    optimizer.tx = type(own)(own.init, dataclasses.replace(cast(Any, update), op=ReduceOp.SUM))
    try:
        yield
    finally:
        optimizer.tx = own


@called(REDUCED)
def _as_count(count: Any) -> jax.Array:
    found = as_array("count", count)
    is_real = found.ndim == 0 and jnp.issubdtype(found.dtype, jnp.number)
    if not is_real or jnp.issubdtype(found.dtype, jnp.complexfloating):
        raise refuse_type(
            f"count={show(count)}.",
            "count is the number of examples of this replica, or the sum of their weights: one "
            "number.",
            "Pass for instance count=x.shape[0].",
        )
    # Only a concrete number can be checked while the step is traced.
    is_known = not isinstance(count, jax.core.Tracer)
    if is_known and not 0 <= float(np.asarray(count)) < math.inf:
        raise refuse(
            f"count={show(count)}.",
            "count is finite, and 0 or more.",
            "Pass for instance count=x.shape[0].",
        )
    return found.astype(jnp.float32)


@called(REDUCED)
def _check_grads(model: nnx.Module, optimizer: "nnx.Optimizer[Any]", grads: Any) -> None:
    """Check that the gradients match the parameters that the optimizer updates."""
    wanted = _describe(nnx.state(model, optimizer.wrt))
    found = _describe(grads)
    wrong = [
        f"{path}: {found.get(path, 'none')} for {wanted.get(path, 'no parameter')}"
        for path in sorted({*wanted, *found})
        if wanted.get(path) != found.get(path)
    ]
    if wrong:
        raise refuse(
            f"grads={show(grads)}, which does not match the parameters:\n{format_lines(wrong)}",
            "Each parameter has a gradient of its shape.",
            "Pass what nnx.grad or nnx.value_and_grad returned for this model.",
            kind=ShapeError,
        )


def _describe(tree: Any) -> dict[str, str]:
    pure = nnx.as_pure(tree) if isinstance(tree, nnx.State) else tree
    leaves = jax.tree_util.tree_flatten_with_path(pure)[0]
    return {
        jax.tree_util.keystr(path): str(list(leaf.shape))
        if hasattr(leaf, "shape")
        else f"an object of type {type(leaf).__name__}"
        for path, leaf in leaves
    }
