"""The update of a step whose replicas may have different numbers of examples."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist._collectives import ReduceOp
from jaxdist._strategies import get_replica_context
from jaxdist._typing import PyTree
from jaxdist._update import CompressedUpdate, ShardedUpdate
from jaxdist._validate import as_array, check_has_arrays, check_instance
from jaxdist.errors import ContextError

Sums = TypeVar("Sums")


def reduce_and_update(
    model: nnx.Module,
    optimizer: "nnx.Optimizer[Any]",
    grads: PyTree,
    count: int | jax.Array,
    sums: Sums,
) -> tuple[jax.Array, Sums]:
    """Update a model in place with the mean gradients over the examples of all replicas.

    Call it inside a replica, with gradients of a *sum* over the replica's examples. The result is
    exact for replicas with different numbers of examples, and with none.

    Shapes:
        In: `grads` as the parameters; `count` `[]`; `sums` any shapes, equal on all replicas.
        Out: `count` and `sums` of all replicas.

    Cost:
        One all-reduce of gradients, `count` and `sums`. `sharded_update` and `compressed_update`
        reduce the gradients themselves, so then it is one for `count` and `sums`.

    Args:
        model: A Flax NNX module.
        optimizer: Its optimizer.
        grads: The gradients of the sum of the losses over the examples of this replica.
        count: The number of these examples, or the sum of their weights.
        sums: Other sums over these examples, such as the loss; a pytree of arrays.

    Returns:
        The number of examples of all replicas (1 if there is none), and the other sums.

    Raises:
        ContextError: Across replicas.
        ArgumentTypeError: The optimizer is no `nnx.Optimizer`, or `count` is no number.

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
    caller = "training.reduce_and_update"
    replica = get_replica_context()
    if replica is None:
        raise ContextError(
            f"{caller} was called across replicas, where no replica has gradients.\n\n"
            "It adds up the gradients of one replica with those of the others.\n\n"
            "Call it inside the function that you pass to strategy.run."
        )
    remedy = "Pass nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)."
    check_instance(caller, "optimizer", optimizer, nnx.Optimizer, "an nnx.Optimizer", remedy)
    check_has_arrays(caller, "grads", grads)
    total = as_array(caller, "count", count).astype(jnp.float32)
    # These transforms all-reduce the gradients themselves. A second all-reduce would multiply them.
    if isinstance(optimizer.tx, (ShardedUpdate, CompressedUpdate)):
        total, sums = replica.all_reduce(ReduceOp.SUM, (total, sums))
    else:
        total, sums, grads = replica.all_reduce(ReduceOp.SUM, (total, sums, grads))
    # A step may have no examples on any replica; its gradients are zero, and not 0 / 0.
    divisor = jnp.where(total == 0, 1, total)
    grads = jax.tree.map(lambda g: (g / divisor).astype(g.dtype), grads)
    optimizer.update(model, grads)
    return divisor, sums
