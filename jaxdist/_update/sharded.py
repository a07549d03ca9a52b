"""`sharded_update`, which runs the update of any optax transformation on pieces."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax

from jaxdist import _collectives, _replica
from jaxdist._called import call_as, called
from jaxdist._collectives import ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._replica import HasLayout, layout_of
from jaxdist._typing import PyTree
from jaxdist._update import checks
from jaxdist._update.init import init_outside, shard_in_step, shard_outside, wrap_in_variables
from jaxdist._update.leaves import Cuts, Leaves
from jaxdist._update.nested import ReducingUpdate, check_nesting, mark_wrapper
from jaxdist._update.run import CALLER, Step
from jaxdist._validate import check_has_arrays, check_size
from jaxdist._values import Sharded, find_layout_of_pieces, gather_whole, is_sharded, whole_array
from jaxdist.errors import ContextError

_WHY_REAL = "Sums in pieces have another order than the sums of virtual replicas."


class ShardedUpdate(ReducingUpdate):
    """An optax transformation whose update the replicas divide; see `sharded_update`.

    `init(params)` and `update(grads, state, params, **extra)` are those of optax. `update` takes
    the gradients of one replica, before any all-reduce.

    Example:
        >>> tx = sharded_update(optax.sgd(0.1))
        >>> isinstance(tx, optax.GradientTransformation)
        True
    """

    __slots__ = ()

    @called("sharded_update: apply_gradients", replaces="sharded_update: update")
    def apply_gradients(
        self, grads: PyTree, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return new parameters and the new state: `update` and `optax.apply_updates` in one.

        Shapes:
            As for `update`.

        Cost:
            As for `update`, without a pass over all parameters on every replica: the parameters
            are updated in pieces, and gathered instead of the updates.

        Args:
            grads: Gradients of this replica.
            state: The state from `init`, or from the previous step.
            params: The parameters, equal on all replicas.
            extra: Extra arguments of the transformation.

        Returns:
            New parameters, whole on every replica, and the new state.

        Raises:
            Everything that `update` raises.

        Example:
            >>> tx = sharded_update(optax.sgd(0.5))
            >>> def step(params, state, grads):
            ...     return tx.apply_gradients(grads, state, params)
            >>> params = jnp.ones(2)
            >>> MirroredStrategy().run(step, (params, tx.init(params), params))[0].tolist()
            [0.5, 0.5]
        """
        own: Any = self.update
        result: tuple[PyTree, PyTree] = own.apply_gradients(grads, state, params, extra)
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """The `init` and `update` functions of a `ShardedUpdate`; `__call__` is `update`."""

    tx: optax.GradientTransformationExtraArgs
    op: ReduceOp
    min_bytes: float | None
    strategy: HasLayout | None

    @called(CALLER)
    def init(self, params: PyTree) -> PyTree:
        """Return the initial state."""
        check_nesting(CALLER, self.op)
        call_as(f"{CALLER}: init", checks.check_arrays, "params", params)
        with mark_wrapper(CALLER):
            return wrap_in_variables(self._init_state(params), params)

    @called(CALLER)
    def _init_state(self, params: PyTree) -> PyTree:
        frame = _replica.current_frame()
        strategy = self.strategy if frame is None else frame.strategy
        # `Sharded` parameters know the mesh of their strategy.
        layout = find_layout_of_pieces(params) if strategy is None else strategy.layout
        if layout is None or layout.num_replicas == 1:
            return self.tx.init(params)
        checks.check_real_replicas(layout, _WHY_REAL)
        cuts = Cuts(layout, self.min_bytes, Leaves.flatten(params, "params"))
        # In a step the replica axes are manual, so each replica takes its pieces. Outside, a jitted
        # `init` with `out_shardings` ensures that no device holds the whole state.
        if frame is not None and frame.is_inside_step:
            whole = jax.tree.map(
                lambda x: gather_whole(x, layout) if is_sharded(x) else x,
                params,
                is_leaf=is_sharded,
            )
            return shard_in_step(self.tx.init(whole), layout, cuts)
        return init_outside(self.tx.init, params, layout, cuts)

    @called(CALLER)
    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        step = self._make_step(updates, state, params, "updates")
        with mark_wrapper(CALLER):
            if step is None:
                return self._run_on_one_replica(updates, state, params, extra, "updates")
            with self._explain_errors(updates, state, params, "updates"):
                return step.run(updates, state, params, extra, gives_params=False)

    @called(CALLER)
    def apply_gradients(
        self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Return new parameters and the new state; see `ShardedUpdate.apply_gradients`."""
        step = self._make_step(grads, state, params, "grads")
        with mark_wrapper(CALLER):
            if step is None:
                updates, state = self._run_on_one_replica(grads, state, params, extra, "grads")
                return optax.apply_updates(params, updates), state
            with self._explain_errors(grads, state, params, "grads"):
                return step.run(grads, state, params, extra, gives_params=True)

    @called(CALLER)
    def _make_step(self, grads: PyTree, state: PyTree, params: PyTree, name: str) -> Step | None:
        """Return the update to run, or None for one replica."""
        check_nesting(CALLER, self.op)
        checks.check_gradients(grads, params, name)
        frame = _replica.current_frame()
        if frame is None:
            checks.check_whole(state)
            return None
        layout: ReplicaMesh = frame.strategy.layout
        if layout.num_replicas == 1:
            return None
        checks.check_real_replicas(layout, _WHY_REAL)
        if frame.replica is None:
            raise ContextError(
                f"sharded_update: update was called {frame.describe()}, for "
                f"{layout.num_replicas} replicas.\n\n"
                "Each replica has the gradients of its part of the batch, so the update is part "
                "of the step.\n\n"
                "Call it in the function that you pass to strategy.run."
            )
        return Step(self.tx.update, self.op, layout, self.min_bytes)

    @contextlib.contextmanager
    def _explain_errors(
        self, grads: PyTree, state: PyTree, params: PyTree, name: str
    ) -> Iterator[None]:
        """Replace errors of the block by clearer ones for gradients or state of wrong structure."""
        # A transformation raises JAX's own errors for a wrong pytree. The search for the cause
        # traces `init`, so it runs only after an error.
        try:
            yield
        except checks.OF_WRONG_TREES as error:
            checks.explain_gradients(error, grads, state, params, name)
            like = grads if params is None else params
            checks.explain_state(error, self.tx.init, state, like, name)
            raise

    def _run_on_one_replica(
        self, grads: PyTree, state: PyTree, params: PyTree, extra: dict[str, Any], name: str
    ) -> tuple[PyTree, PyTree]:
        """Run the update on one replica; its state may still be `Sharded`, in one piece each."""
        held, treedef = jax.tree.flatten(state, is_leaf=is_sharded)
        whole = [whole_array(x) for x in held]
        with self._explain_errors(grads, state, params, name):
            updates, after = self.tx.update(
                grads, jax.tree.unflatten(treedef, whole), params, **extra
            )
        if not any(map(is_sharded, held)):
            return updates, after
        # The new state has the structure of the old one, as a loop over steps requires.
        new = [
            Sharded(x, *old.cut) if isinstance(old, Sharded) else x
            for x, old in zip(treedef.flatten_up_to(after), held, strict=True)
        ]
        return updates, jax.tree.unflatten(treedef, new)


@called(CALLER)
def sharded_update(
    tx: optax.GradientTransformation | optax.MultiSteps,
    *,
    reduce_op: ReduceOp | str = "mean",
    min_bytes: float | None = None,
    strategy: HasLayout | None = None,
) -> ShardedUpdate:
    """Wrap an optax transformation so that each replica updates a piece of every array (ZeRO-1).

    In a step, `updates, state = tx.update(grads, state, params)` takes the replica's own
    gradients; do not all-reduce them before. It reduces them piece by piece (a reduce-scatter),
    updates the pieces, and gathers the updates. The optimizer state is sharded, with one piece on
    each device. With one replica it is equivalent to `tx`.

    Put everything that changes the gradients inside: a transformation that is chained before this
    one sees the gradients of only one replica.

    Guarantees:
        The results are those of `tx` on all-reduced gradients, up to the order of sums. jaxdist
        proves this operation by operation from the traced `tx.update`. Operations that are known
        to be elementwise run on pieces. Sums over a leaf or a tree get an all-reduce. For every
        other operation, whole arrays are gathered.

    Shapes:
        Gradients, parameters and updates are whole. State leaves `[..., n, ...]` are `Sharded`
        along one dim; small ones, and scalars, are whole on every replica.

    Cost:
        For each large leaf one reduce-scatter and one all-gather: together the bytes of an
        all-reduce. One all-reduce for all small leaves. The state takes `1/R` of the memory, and
        the update `1/R` of the time. An operation that cannot run on pieces costs one more
        all-gather.

    Args:
        tx: Any optax transformation, including `optax.MultiSteps`.
        reduce_op: How to reduce the gradients of the replicas, `"mean"` or `"sum"`.
        min_bytes: Leaves with fewer bytes (in float32) stay whole on every replica; None takes
            the size from which sharding is faster, by the latency of a collective.
        strategy: The strategy for which `init` shards the state if no strategy is current.

    Returns:
        An `optax.GradientTransformationExtraArgs` with one more method, `apply_gradients`.

    Raises:
        ArgumentTypeError: `tx` is not an optax transformation.
        ArgumentError: Unknown `reduce_op`, or `min_bytes` below 0; when used, a strategy with
            `deterministic=True`, or a `tx` that contains a `sharded_update` or
            `compressed_update`.

    Example:
        >>> strategy = MirroredStrategy()
        >>> tx = sharded_update(optax.adam(0.1), min_bytes=0)
        >>> def step(w, state, x):
        ...     grads = jax.grad(lambda w: jnp.sum(w * x))(w)
        ...     updates, state = tx.update(grads, state, w)
        ...     return optax.apply_updates(w, updates), state
        >>> w = jnp.ones(16)
        >>> with strategy.scope():
        ...     state = tx.init(w)
        >>> w, state = strategy.run(step, (w, state, PerReplica(np.arange(8.0))))
        >>> state[0].mu.array.addressable_shards[0].data.shape, round(float(w[0]), 3)
        ((2,), 0.9)

    Source:
        ZeRO, arXiv:1910.02054; Xu et al., arXiv:2004.13336.
    """
    whole = checks.as_transformation(tx)
    op = _collectives.reduce_op(reduce_op)
    if strategy is not None:
        call_as("sharded_update", layout_of, strategy)
    own = _Update(whole, op, check_size("min_bytes", min_bytes), strategy)
    return ShardedUpdate(own.init, own)


@called("shard_state", replaces="sharded_update: update")
def shard_state(state: PyTree, strategy: HasLayout, *, min_bytes: float | None = None) -> PyTree:
    """Shard optimizer state of any layout for the replicas of a strategy.

    Use it for a state that was made for another number of replicas, or by the unwrapped
    transformation.

    Shapes:
        Arrays may be whole, `Sharded`, or on the host; the result is as `sharded_update` makes it.

    Cost:
        A copy; `Sharded` arrays are gathered first.

    Args:
        state: Any pytree.
        strategy: The strategy whose steps will take the state.
        min_bytes: As for `sharded_update`.

    Returns:
        The pytree with `Sharded` and replicated arrays. With one replica all are whole.

    Raises:
        ArgumentTypeError: `strategy` is not a strategy.

    Example:
        >>> strategy = MirroredStrategy()
        >>> state = shard_state(optax.adam(1e-3).init(jnp.ones((3, 16))), strategy, min_bytes=0)
        >>> state[0].mu
        Sharded(float32[3, 16] cut along dim 1, held as [3, 16])
    """
    layout = layout_of(strategy)
    check_has_arrays("state", state)
    checks.refuse_per_replica("state", state)
    return shard_outside(state, layout, Cuts(layout, check_size("min_bytes", min_bytes)))
