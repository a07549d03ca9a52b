"""`compressed_update`: gradients that cross slow links in few bits."""

import dataclasses
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist import _collectives, _replica, cost
from jaxdist._collectives import CompressedSum, Errors, ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import HasLayout
from jaxdist._typing import PyTree
from jaxdist._update.checks import (
    as_transformation,
    check_arrays,
    check_gradients,
    layout_of,
)
from jaxdist._update.nested import COMPRESSED, check_nesting, mark_wrapper
from jaxdist._validate import shown
from jaxdist._values import Cut, Sharded, cut_for, from_state
from jaxdist.errors import ArgumentError, ArgumentTypeError, ContextError

CALLER = COMPRESSED
_LOG = logging.getLogger("jaxdist")


class CompressionErrors(NamedTuple):
    """What rounding has taken away so far; each replica holds what it lost itself.

    The two arrays have a row for each replica. They are of one number of replicas and workers;
    `training.Checkpoints` restores them on another, as the one vector that they stand for.

    Example:
        >>> tx = compressed_update(optax.sgd(0.1), "int8", workers=2, strategy=MirroredStrategy())
        >>> tx.init(jnp.ones(1024))[0].given.shape
        (8, 512)
    """

    given: Any
    summed: Any


class CompressedUpdate(optax.GradientTransformationExtraArgs):
    """An optax transformation that reduces the gradients itself; see `compressed_update`.

    Example:
        >>> isinstance(compressed_update(optax.sgd(0.1), "bf16"), optax.GradientTransformation)
        True
    """

    __slots__ = ()


def compressed_update(
    tx: optax.GradientTransformation | optax.MultiSteps,
    compression: str = "int8",
    *,
    workers: int | None = None,
    reduce_op: ReduceOp | str = "mean",
    strategy: HasLayout | None = None,
) -> CompressedUpdate:
    """Wrap an optax transformation so that gradients cross between workers in few bits.

    In a step, `updates, state = tx.update(grads, state, params)` takes the gradients of the
    replica as they are, without an all-reduce before. They are added up within each worker in
    float32, and across workers in bfloat16, or in 8 bits with a scale for each 256 numbers. What
    rounding takes away is kept on each replica and sent with the next gradients, so that nothing
    is lost for good. Every replica gets the same bits.

    Shapes:
        Gradients, parameters and updates are whole. The state is `(CompressionErrors, state of
        tx)`; with `G` replicas in a worker the errors are `1/G` of the gradients' size, and a
        `W`-th of that, on each device.

    Cost:
        Within workers a reduce-scatter and an all-gather of all bytes. Across, `2 (W-1)/W` of
        `1/G` of the elements out of each device, of 2 bytes each or of 1.016. On one vector of
        all leaves: two copies.

    Args:
        tx: Any optax transformation.
        compression: `"bf16"` or `"int8"`.
        workers: How many groups of neighbouring replicas exchange codes. None is one for each
            process, or slice of TPUs; with one worker nothing is compressed, which is logged.
        reduce_op: How the gradients of the replicas are put together, `"mean"` or `"sum"`.
        strategy: Whose replicas the state of `init` is for where no strategy is current.

    Returns:
        An optax transformation.

    Raises:
        ArgumentTypeError: `tx` is not optax's; in `update`, gradients that are no real numbers, or
            a state that is none.
        ShapeError: In `update`, gradients that are not those of the parameters.
        ArgumentError: Unknown `compression` or `reduce_op`; workers that do not divide the
            replicas; a state of other replicas or workers; a `tx` in which there is another one,
            or a `sharded_update` that sums.
        ContextError: `update` outside of a step.

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
    _collectives.compression_of(CALLER, compression)
    if strategy is not None:
        layout_of(CALLER, strategy)
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int)):
        raise ArgumentTypeError(
            f"{CALLER} was given workers={shown(workers)}.\n\n"
            "workers is a number of workers, or None.\n\nPass for instance workers=2."
        )
    op = _collectives.reduce_op(CALLER, reduce_op)
    own = _Update(as_transformation(tx, CALLER), compression, workers, op, strategy)
    return CompressedUpdate(own.init, own)


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """The two functions of a `CompressedUpdate`; calling it is `update`."""

    tx: optax.GradientTransformationExtraArgs
    compression: str
    workers: int | None
    op: ReduceOp
    strategy: HasLayout | None

    def init(self, params: PyTree) -> PyTree:
        """No errors, and the state of the transformation."""
        check_nesting(CALLER, self.op)
        check_arrays(f"{CALLER}: init", "params", params)
        frame = _replica.current_frame()
        strategy = self.strategy if frame is None else frame.strategy
        with mark_wrapper(CALLER):
            inner = self.tx.init(params)
        how = None if strategy is None else self._compressed_sum(strategy.layout)
        if how is None:
            return optax.EmptyState(), inner
        size = sum(int(jnp.size(x)) for x in jax.tree.leaves(params))
        inside = frame is not None and frame.inside_step
        errors = self._make_zero_errors(how, size, in_step=inside)
        if any(isinstance(x, nnx.Variable) for x in jax.tree.leaves(params, is_leaf=_is_variable)):
            # NNX would make a variable of the array in a `Sharded`, and lose what it says of it.
            errors = CompressionErrors(*map(nnx.Variable, errors))
        return errors, inner

    def _make_zero_errors(
        self, how: CompressedSum, size: int, *, in_step: bool
    ) -> CompressionErrors:
        layout = how.layout
        made = []
        for own in how.no_errors(size):
            cut = Cut(0, layout.num_replicas)
            rows = (layout.num_replicas, own.size)
            made.append(
                Sharded(own[None], *cut) if in_step else cut_for(jnp.zeros(rows), cut, layout)
            )
        return CompressionErrors(*made)

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        check_nesting(CALLER, self.op)
        if not isinstance(state, tuple) or len(state) != 2:
            raise ArgumentTypeError(
                f"{CALLER}: update was given a state of type {type(state).__name__}.\n\n"
                "The state is (errors, state of the transformation).\n\n"
                "Pass what tx.init(params), or the update before, returned."
            )
        errors, inner = state
        if isinstance(errors, CompressionErrors):
            errors = CompressionErrors(*map(from_state, errors))
        frame = _replica.current_frame()
        several = frame is not None and frame.strategy.layout.num_replicas > 1
        if (several and not frame.replica) or (frame is None and errors):
            where = "outside every strategy" if frame is None else frame.describe()
            raise ContextError(
                f"{CALLER}: update was called {where}.\n\n"
                "It sums the gradients of all replicas, so every replica calls it.\n\n"
                "Call it in the step that you pass to strategy.run."
            )
        how = None if frame is None else self._compressed_sum(frame.strategy.layout)
        check_gradients(updates, params, CALLER)
        if how is not None:
            updates, errors = self._reduce(how, updates, errors)
        elif frame is not None:
            layout: ReplicaMesh = frame.strategy.layout
            updates = _collectives.all_reduce(CALLER, self.op, updates, layout)
        with mark_wrapper(CALLER):
            updates, inner = self.tx.update(updates, inner, params, **extra)
        return updates, (errors, inner)

    def _reduce(self, how: CompressedSum, grads: PyTree, errors: Any) -> tuple[PyTree, Any]:
        named, treedef = tree_flatten_with_path(grads)
        if not named:
            return grads, errors
        leaves = [_check_real(path, leaf) for path, leaf in named]
        vector = jnp.concatenate([x.astype(jnp.float32).ravel() for x in leaves])
        own = [x.array[0] for x in self._check_errors(how, vector.size, errors)]
        if self.op is ReduceOp.MEAN:
            # Before the sum, so that errors are those of a mean, whoever sends them later.
            vector = vector / how.layout.num_replicas
        total, after = how(vector, Errors(*own))
        found: list[jax.Array] = []
        end = 0
        for x in leaves:
            start, end = end, end + x.size
            found.append(total[start:end].reshape(x.shape).astype(x.dtype))
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

    def _compressed_sum(self, layout: ReplicaMesh) -> CompressedSum | None:
        """How to add up, or None where there is nothing to compress."""
        count = layout.num_replicas
        if count == 1:
            return None
        if layout.num_virtual is not None:
            raise ArgumentError(
                f"{CALLER} was used with a strategy with deterministic=True.\n\n"
                "The rounding depends on the workers, and so on the devices.\n\n"
                "Make the strategy without deterministic, or use tx itself on all-reduced "
                "gradients."
            )
        workers = self.workers
        if workers is None:
            workers = len({cost.worker_of(d) for d in layout.devices})
            if workers == 1:
                _LOG.info("%s: all replicas are of one worker; nothing is compressed", CALLER)
        if workers < 1 or count % workers:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise ArgumentError(
                f"{CALLER} was given workers={workers}, and the strategy has {count} replicas.\n\n"
                "Every worker has the same number of replicas.\n\n"
                f"Pass workers={' or '.join(map(str, fitting))}."
            )
        if workers == 1:
            return None
        how = _collectives.compression_of(CALLER, self.compression)
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


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
