"""`compressed_update`, which sends gradients over slow links with few bits.

# Note [Error feedback]
Rounding a gradient to 8 bits can lose the same small parts in every step, and training can stall.
So each replica keeps the difference between the number and the rounded number, and adds it to the
gradient of the next step. The sum of all sent numbers then differs from the true sum by only one
rounding error, not by one for each step. The state of the transformation is therefore a pair: the
errors, which differ between replicas, and the state of `tx`.
"""

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _collectives, _replica, cost
from jaxdist._called import call_as, called, refuse, refuse_type
from jaxdist._collectives import CompressedSum, ReduceOp, RoundingErrors
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import HasLayout, layout_of
from jaxdist._typing import PyTree
from jaxdist._update.checks import (
    as_transformation,
    check_arrays,
    check_gradients,
    check_real_replicas,
)
from jaxdist._update.init import wrap_in_variables
from jaxdist._update.nested import COMPRESSED, ReducingUpdate, check_nesting, mark_wrapper
from jaxdist._validate import show
from jaxdist._values import Cut, Sharded, cut_and_place, from_state
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError

CALLER = COMPRESSED
_LOG = logging.getLogger("jaxdist")


class CompressionErrors(NamedTuple):
    """The rounding errors that each replica has kept so far. See Note [Error feedback].

    The two arrays have a row for each replica. Their shapes depend on the number of replicas and
    workers. `training.Checkpoints` restores them for other numbers, from the one vector that the
    errors represent.

    Example:
        >>> tx = compressed_update(optax.sgd(0.1), "int8", workers=2, strategy=MirroredStrategy())
        >>> tx.init(jnp.ones(1024))[0].given.shape
        (8, 512)
    """

    given: Any
    summed: Any


class CompressedUpdate(ReducingUpdate):
    """An optax transformation that all-reduces the gradients itself; see `compressed_update`.

    Example:
        >>> isinstance(compressed_update(optax.sgd(0.1), "bf16"), optax.GradientTransformation)
        True
    """

    __slots__ = ()


@called(CALLER)
def compressed_update(
    tx: optax.GradientTransformation | optax.MultiSteps,
    compression: str = "int8",
    *,
    workers: int | None = None,
    reduce_op: ReduceOp | str = "mean",
    strategy: HasLayout | None = None,
) -> CompressedUpdate:
    """Wrap an optax transformation so that workers exchange gradients with few bits.

    In a step, `updates, state = tx.update(grads, state, params)` takes the replica's own
    gradients; do not all-reduce them before. It sums them within each worker in float32, and
    across workers in bfloat16, or in 8 bits with a scale for each 256 numbers. Each replica keeps
    its rounding errors and sends them with the next gradients, so that nothing is lost for good.
    Every replica gets the same bits.

    Shapes:
        Gradients, parameters and updates are whole. The state is `(CompressionErrors, state of
        tx)`. With `W` workers of `G` replicas, the two arrays of errors on each device have `1/G`
        and `1/(G W)` of the size of the gradients.

    Cost:
        Within workers a reduce-scatter and an all-gather of all bytes. Across workers, each device
        sends `2 (W-1)/W` of `1/G` of the elements, with 2 or 1.016 bytes each. All leaves are
        copied to one vector and back: two copies.

    Args:
        tx: Any optax transformation.
        compression: `"bf16"` (or `"bfloat16"`), or `"int8"`.
        workers: Number of groups of neighbouring replicas that exchange compressed gradients. None
            means one for each process or TPU slice; with one, nothing is compressed (logged).
        reduce_op: How to reduce the gradients of the replicas, `"mean"` or `"sum"`.
        strategy: The strategy for which `init` makes the state if no strategy is current.

    Returns:
        An optax transformation.

    Raises:
        ArgumentTypeError: `tx` is not an optax transformation; in `update`, gradients are not real
            numbers, or the state is not one of this transformation.
        ShapeError: In `update`, the gradients do not fit the parameters.
        ArgumentError: Unknown `compression` or `reduce_op`; `workers` does not divide the
            replicas; the state belongs to other replicas or workers; `tx` contains another
            `compressed_update`, or a `sharded_update` that sums.
        ContextError: `update` is called outside of a step.

    Example:
        >>> strategy = MirroredStrategy()
        >>> tx = compressed_update(optax.sgd(1.0), "int8", workers=2)
        >>> with strategy.scope():
        ...     state = tx.init(jnp.zeros(4))
        >>> def step(state, grads):
        ...     updates, state = tx.update(grads, state)
        ...     return updates, state
        >>> updates, state = strategy.run(step, (state, jnp.full(4, 127.0)))
        >>> updates.tolist()
        [-127.0, -127.0, -127.0, -127.0]

    Source:
        Error feedback: Seide et al., 2014; Karimireddy et al., arXiv:1901.09847.
    """
    _collectives.find_compression(compression)
    if strategy is not None:
        layout_of(strategy)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int)):
        raise refuse_type(
            f"workers={show(workers)}.",
            "workers is a number of workers, or None.",
            "Pass for instance workers=2.",
        )
    op = _collectives.reduce_op(reduce_op)
    own = _Update(as_transformation(tx), compression, workers, op, strategy)
    return CompressedUpdate(own.init, own)


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """The `init` and `update` functions of a `CompressedUpdate`; `__call__` is `update`."""

    tx: optax.GradientTransformationExtraArgs
    compression: str
    workers: int | None
    op: ReduceOp
    strategy: HasLayout | None

    @called(CALLER)
    def init(self, params: PyTree) -> PyTree:
        """Return errors of zero and the state of the transformation."""
        check_nesting(CALLER, self.op)
        call_as(f"{CALLER}: init", check_arrays, "params", params)
        frame = _replica.current_frame()
        strategy = self.strategy if frame is None else frame.strategy
        with mark_wrapper(CALLER):
            inner = self.tx.init(params)
        how = None if strategy is None else self._compressed_sum(strategy.layout)
        if how is None:
            return optax.EmptyState(), inner
        size = sum(int(jnp.size(x)) for x in jax.tree.leaves(params))
        count = how.layout.num_replicas
        cut, own = Cut(0, count), how.no_errors(size)
        if frame is not None and frame.is_inside_step:
            errors = [Sharded(x[None], *cut) for x in own]
        else:
            errors = [cut_and_place(jnp.zeros((count, x.size)), cut, how.layout) for x in own]
        return wrap_in_variables(CompressionErrors(*errors), params), inner

    @called(CALLER)
    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        check_nesting(CALLER, self.op)
        if not isinstance(state, tuple) or len(state) != 2:
            raise call_as(
                f"{CALLER}: update",
                refuse_type,
                f"a state of type {type(state).__name__}.",
                "The state is (errors, state of the transformation).",
                "Pass what tx.init(params), or the previous update, returned.",
            )
        errors, inner = state
        if isinstance(errors, CompressionErrors):
            errors = CompressionErrors(*map(from_state, errors))
        frame = _replica.current_frame()
        several = frame is not None and frame.strategy.layout.num_replicas > 1
        # Outside of a strategy, a state without errors belongs to one replica, and is valid.
        if (several and not frame.replica) or (frame is None and errors):
            where = "outside every strategy" if frame is None else frame.describe()
            raise ContextError(
                f"{CALLER}: update was called {where}.\n\n"
                "It sums the gradients of all replicas, so every replica calls it.\n\n"
                "Call it in the step that you pass to strategy.run."
            )
        how = None if frame is None else self._compressed_sum(frame.strategy.layout)
        check_gradients(updates, params)
        if how is not None:
            updates, errors = self._reduce(how, updates, errors)
        elif frame is not None:
            layout: ReplicaMesh = frame.strategy.layout
            updates = _collectives.all_reduce(self.op, updates, layout)
        with mark_wrapper(CALLER):
            updates, inner = self.tx.update(updates, inner, params, **extra)
        return updates, (errors, inner)

    def _reduce(self, how: CompressedSum, grads: PyTree, errors: Any) -> tuple[PyTree, Any]:
        named, treedef = tree_flatten_with_path(grads)
        if not named:
            return grads, errors
        # One vector, so that the scales of 256 numbers and the errors may cross leaf boundaries.
        leaves = [_check_real(path, leaf) for path, leaf in named]
        vector, restore = ravel_pytree([x.astype(jnp.float32) for x in leaves])
        own = [x.array[0] for x in self._check_errors(how, vector.size, errors)]
        if self.op is ReduceOp.MEAN:
            # Divide before the sum. Then the errors are those of the mean, and stay valid when a
            # checkpoint restores them for another number of replicas.
            vector = vector / how.layout.num_replicas
        total, after = how(vector, RoundingErrors(*own))
        found = [x.astype(like.dtype) for x, like in zip(restore(total), leaves, strict=True)]
        kept = [Sharded(e[None], *old.cut) for e, old in zip(after, errors, strict=True)]
        return treedef.unflatten(found), CompressionErrors(*kept)

    def _check_errors(self, how: CompressedSum, size: int, errors: Any) -> tuple[Sharded, Sharded]:
        count = how.layout.num_replicas
        wanted = [[count, e.size] for e in jax.eval_shape(lambda: how.no_errors(size))]
        pieces = tuple(errors) if isinstance(errors, tuple) else ()
        given = [list(x.shape) if isinstance(x, Sharded) else None for x in pieces]
        if given != wanted:
            raise ArgumentError(
                f"{CALLER}: the errors in the state have the shapes {given}, and those of {size} "
                f"gradient elements on {count} replicas of {how.workers} workers have {wanted}.\n\n"
                "The errors belong to the replicas that made them, and to one number of workers."
                "\n\nMake the state in the scope of this strategy. jaxdist.training.Checkpoints "
                "restores one of other replicas, like=tx.init(params); from elsewhere keep its "
                "second part, and take the first from tx.init(params)."
            )
        return pieces

    @called(CALLER)
    def _compressed_sum(self, layout: ReplicaMesh) -> CompressedSum | None:
        """Return the sum to use, or None if there is nothing to compress."""
        count = layout.num_replicas
        if count == 1:
            return None
        check_real_replicas(layout, "The rounding depends on the workers, and so on the devices.")
        workers = self.workers
        if workers is None:
            workers = len({cost.worker_of(d) for d in layout.devices})
            if workers == 1:
                _LOG.info("%s: all replicas are on one worker; nothing is compressed", CALLER)
        if workers < 1 or count % workers:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise refuse(
                f"workers={workers}, and the strategy has {count} replicas.",
                "Every worker has the same number of replicas.",
                f"Pass workers={' or '.join(map(str, fitting))}.",
            )
        if workers == 1:
            return None
        how = _collectives.find_compression(self.compression)
        return CompressedSum(how, layout, count // workers)


def _check_real(path: Any, leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"{CALLER}: grads{keystr(path)} is {array.dtype}{list(array.shape)}.\n\n"
            "Gradients that are compressed are real numbers.\n\n"
            "Use optax.masked for the others, or all_reduce and the transformation itself."
        )
    return array
