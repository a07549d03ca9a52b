"""The context of a call: outside every strategy, in a scope, or inside a replica of a step."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import keystr

from jaxdist import _collectives, _compat
from jaxdist._called import called, refuse_type
from jaxdist._collectives import ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._validate import as_flag, check_call_arguments, check_callable, show
from jaxdist._values import (
    CallContext,
    DistributedValues,
    Handle,
    Stop,
    get_own_values,
    is_variable,
    stops,
)
from jaxdist.errors import ContextError


class HasLayout(Protocol):
    """The part of a strategy that lower rooms may use: its mesh."""

    @property
    def layout(self) -> ReplicaMesh:
        """The mesh and its replica axes."""
        ...


def layout_of(
    strategy: Any,
    remedy: str = "Pass for instance jaxdist.MirroredStrategy().",
) -> ReplicaMesh:
    """Check that `strategy` is a strategy, and return its mesh."""
    layout = getattr(strategy, "layout", None)
    if not isinstance(layout, ReplicaMesh):
        raise refuse_type(
            f"strategy={show(strategy)}.", "strategy is a strategy of jaxdist.", remedy
        )
    return layout


# Note [Notes of a step]
# A function may note something about the step that is being traced, for later calls in it. JAX
# keeps the jaxprs of inner functions (`jax.jit`, `jax.checkpoint`, `jax.lax.scan`). One of another
# trace would neither note anything, nor follow the notes of this trace. So once a step has used
# notes, every trace of a step has a key of its own in JAX's caches.
_uses_notes: list[bool] = []


def _share_notes() -> dict[Any, Any]:
    """Return the notes of the step around the caller, or those of a new step."""
    around = FRAME.get()
    return around.notes if around is not None and around.is_inside_step else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One level of context: the scope of a strategy, a replica of a step, or a merge function."""

    strategy: Any
    replica: "ReplicaContext | None" = None
    in_merge: bool = False
    # The `_values.Access` through which the traced step reads and changes variables, or None.
    variables: Any = None
    # The shape and the layout of each input of the traced step.
    placed: tuple[tuple[tuple[int, ...], PartitionSpec], ...] = ()
    # See Note [Notes of a step].
    notes: dict[Any, Any] = dataclasses.field(
        default_factory=_share_notes, compare=False, repr=False
    )

    @property
    def is_inside_step(self) -> bool:
        """Whether a step is being traced around the caller."""
        return self.replica is not None or self.in_merge

    def describe(self) -> str:
        """Return a phrase that describes this context, for error messages."""
        name = type(self.strategy).__name__
        if self.in_merge:
            return f"in a merge function of {name}"
        if self.replica is not None:
            return f"inside a replica, in a function run by {name}.run"
        return f"in the cross-replica context of {name} (its scope)"


# `FRAME` is None by default, which means the ambient strategy. `_OUTSIDE` means no strategy.
FRAME: ContextVar[Frame | None] = ContextVar("jaxdist_frame", default=None)
_OUTSIDE = Frame(None)
# The strategy of `experimental_set_strategy`. As `tf.distribute` documents, it is the same in all
# threads, so it cannot be a `ContextVar`.
ambient: list[Frame] = []


def current_frame() -> Frame | None:
    """Return the innermost context of the caller, or None outside every strategy."""
    frame = FRAME.get()
    if frame is None:
        return ambient[0] if ambient else None
    return None if frame is _OUTSIDE else frame


def innermost_explicit_frame() -> Frame | None:
    """Return the innermost context that a block entered; ignore the ambient strategy."""
    frame = FRAME.get()
    return None if frame is _OUTSIDE else frame


def find_call_context() -> CallContext:
    """Return what `_values` needs to know about the place where a variable is used."""
    frame = current_frame()
    if frame is None:
        return CallContext()
    return CallContext(frame.strategy, frame.strategy.layout, frame.variables, frame.is_inside_step)


def find_notes() -> dict[Any, Any] | None:
    """Return the notes of the step around the caller; None outside of steps."""
    frame = current_frame()
    if frame is None or not frame.is_inside_step:
        return None
    _uses_notes[:] = [True]
    return frame.notes


def set_ambient(strategy: Any | None) -> None:
    """Make `strategy` the ambient strategy of the process; None clears it."""
    ambient[:] = [] if strategy is None else [Frame(strategy)]


def enter_frame(frame: Frame | None) -> contextlib.AbstractContextManager[None]:
    """Make `frame` the innermost context in the block; None means outside every strategy."""
    if frame is not None and frame.is_inside_step and _uses_notes:
        return _enter_noted(frame)
    return _compat.set_in_block(FRAME, _OUTSIDE if frame is None else frame)


@contextlib.contextmanager
def _enter_noted(frame: Frame) -> Iterator[None]:
    with _compat.set_in_block(FRAME, frame), _collectives.fresh_trace_key():
        yield


class ReplicaContext:
    """A replica as seen from inside a step; `get_replica_context()` returns it.

    Example:
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", x)
        >>> float(MirroredStrategy().run(step, (1.0,)))
        8.0

    Source:
        `tf.distribute.ReplicaContext`.
    """

    __slots__ = ("_layout", "_strategy", "_traced")

    @called("ReplicaContext")
    def __init__(self, strategy: Any, *, traced: bool = True) -> None:
        remedy = "Use the context of the running step: jaxdist.get_replica_context()."
        self._strategy = strategy
        self._layout = layout_of(strategy, remedy)
        self._traced = as_flag("traced", traced)

    @property
    def strategy(self) -> Any:
        """The strategy that runs this step.

        Example:
            >>> get_replica_context().strategy is get_strategy()
            True
        """
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run this step together.

        Example:
            >>> MirroredStrategy().run(lambda: get_replica_context().num_replicas_in_sync)
            8
        """
        return self._layout.num_replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, from 0.

        Shapes:
            A traced int32 scalar inside `run`; the Python integer 0 outside every strategy.

        Cost:
            None.

        Example:
            >>> MirroredStrategy().run(lambda: get_replica_context().replica_id_in_sync_group)
            PerReplica(0, 1, 2, 3, 4, 5, 6, 7)
        """
        if not self._traced:
            return 0
        self._check_is_current("replica_id_in_sync_group")
        return jax.lax.axis_index(self._layout.replica_axes)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices of this context.

        jaxdist traces one program for all replicas, so inside `run` these are the devices of all
        replicas. Outside every strategy it is the default device.

        Example:
            >>> get_replica_context().devices
            ('/job:localhost/replica:0/task:0/device:CPU:0',)
        """
        return tuple(self._strategy.extended.worker_devices)

    @called("ReplicaContext.all_reduce")
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Combine `value` over all replicas; every replica gets the result.

        Shapes:
            In: any pytree, with leaves `[...]` on each replica. Out: the same.

        Cost:
            One all-reduce of all leaves of one dtype: at most `2 (R-1)/R` of its bytes per device.
            With `options.bytes_per_pack`, one for each pack; the bytes in total are the same.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            value: Pytree of arrays and numbers. Floats keep their dtype; booleans are counted
                in int32; the mean of integers is a true division with the default float as dtype.
                For `IndexedSlices`, the rows of all replicas are concatenated (two all-gathers),
                and for a mean divided by the number of replicas.
            options: `experimental.CommunicationOptions`; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree like `value`, the same on all replicas. Its gradient is an all-reduce of the
            gradients of all replicas with the same op.

        Raises:
            ArgumentError: Unknown `reduce_op`.
            ArgumentTypeError: A leaf whose type cannot be summed.
            ContextError: Called outside the step that this context belongs to.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_reduce(ReduceOp.MEAN, {"x": x})
            >>> MirroredStrategy().run(step, (PerReplica(range(8)),))
            {'x': Array(3.5, dtype=float32)}

        Source:
            `tf.distribute.ReplicaContext.all_reduce`.
        """
        op = _collectives.reduce_op(reduce_op)
        communication: _collectives.Communication = self._strategy.communication
        chosen = communication.read_call(options, experimental_hints, packs=True)
        # Outside every strategy, the value of the only replica is the result.
        if not self._traced:
            return _collectives.reduce_tree_of_one(op, value)
        self._check_is_current("all_reduce")
        ops = communication.ops
        if ops is None:
            return _collectives.all_reduce_tree(op, value, self._layout, chosen)
        # A user's `CrossDeviceOps` works on all replicas at once, so it runs as a merge function.
        with enter_frame(self._merge_frame()):
            return _collectives.all_reduce_tree(op, value, self._layout, chosen, ops)

    @called("ReplicaContext.all_gather")
    def all_gather(
        self,
        value: PyTree,
        axis: int,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Concatenate `value` of all replicas along `axis`; every replica gets the result.

        Shapes:
            In: leaves `[..., n, ...]` on each replica. Out: `[..., R*n, ...]`.

        Cost:
            One all-gather per leaf: `(R-1)` times its bytes into each device.

        Args:
            value: Pytree of arrays of any dtype, rank 1 and up.
            axis: Dim to concatenate along; negative counts from the end.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree like `value`. Its gradient: the gradients of the result are summed over the
            replicas, and each replica gets its own slice of the sum.

        Raises:
            ShapeError: A scalar leaf, or an axis outside the rank.
            ContextError: Called outside the step that this context belongs to.

        Example:
            >>> def step(x):
            ...     return get_replica_context().all_gather(x[None], axis=0)
            >>> MirroredStrategy(["cpu:0", "cpu:1"]).run(step, (PerReplica([1, 2]),)).tolist()
            [1, 2]

        Source:
            `tf.distribute.ReplicaContext.all_gather`.
        """
        communication: _collectives.Communication = self._strategy.communication
        chosen = communication.read_call(options, experimental_hints)
        # Check before any communication, and also outside of a strategy, so that code that runs
        # there does not fail later in a step.
        for path, leaf in jax.tree.flatten_with_path(value, is_leaf=stops(Stop.SPARSE))[0]:
            _collectives.refuse_slices("value" + keystr(path), leaf)
        if not self._traced:
            return value
        self._check_is_current("all_gather")
        ops = communication.ops
        if ops is not None and _collectives.has_override(ops, "gather_implementation"):
            with enter_frame(self._merge_frame()):
                return jax.tree.map_with_path(
                    lambda path, leaf: _collectives.gather_by_ops(
                        ops,
                        "value" + keystr(path),
                        Handle(jnp.asarray(leaf), self._layout),
                        axis,
                        self._layout,
                        chosen,
                    ),
                    value,
                )
        return _collectives.all_gather(value, axis, self._layout.replica_axes)

    @called("ReplicaContext.merge_call")
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once for all replicas.

        `merge_fn` gets arrays as `PerReplica` handles: `strategy.reduce`, `strategy.gather` and
        `strategy.extended.broadcast_to` on them are collectives. Every replica gets the result, and
        its own value of each `PerReplica` in the result.

        Cost:
            The collectives that `merge_fn` runs. `.values` of a handle and
            `strategy.experimental_local_results` are an all-gather.

        Args:
            merge_fn: Function of the strategy and the arguments.
            args: Positional arguments of this replica.
            kwargs: Keyword arguments of this replica.

        Returns:
            The result of `merge_fn`, as this replica sees it.

        Raises:
            ContextError: Called outside the step that this context belongs to.

        Example:
            >>> def total(strategy, x):
            ...     return strategy.reduce("SUM", x, axis=None)
            >>> def step(x):
            ...     return get_replica_context().merge_call(total, args=(x,))
            >>> float(MirroredStrategy().run(step, (PerReplica(range(8)),)))
            28.0

        Source:
            `tf.distribute.ReplicaContext.merge_call`.
        """
        check_callable(merge_fn, "merge_fn")
        check_call_arguments(args, kwargs)
        given = (tuple(args), dict(kwargs or {}))

        def merge(given: Any, variables: Any) -> Any:
            if self._traced:
                # A `Variable` is a pytree node, and must reach `merge_fn` as the same object.
                given = jax.tree.map(self._as_handle, given, is_leaf=is_variable)
            with enter_frame(Frame(self._strategy, in_merge=self._traced, variables=variables)):
                result = merge_fn(self._strategy, *given[0], **given[1])
            return get_own_values(result, self._layout)

        if not self._traced:
            return merge(given, None)
        self._check_is_current("merge_call")
        around = innermost_explicit_frame()
        access = None if around is None else around.variables
        # `access.merge` calls it, so that all replicas reach the call together (op by op, each
        # replica is a thread), and passes the variables that `merge_fn` may use.
        return merge(given, None) if access is None else access.merge(merge, merge_fn, given)

    def _merge_frame(self) -> Frame:
        """Return the frame for code that runs once for all replicas."""
        around = innermost_explicit_frame()
        variables = around.variables if around is not None and self._traced else None
        return Frame(self._strategy, in_merge=self._traced, variables=variables)

    def _as_handle(self, leaf: Any) -> Any:
        is_array = hasattr(leaf, "dtype") and not isinstance(leaf, DistributedValues)
        return Handle(leaf, self._layout) if is_array else leaf

    def _check_is_current(self, what: str) -> None:
        # A context kept from an earlier trace would use an axis of a finished `shard_map`.
        frame = innermost_explicit_frame()
        if frame is not None and frame.replica is self:
            self._layout.check_axes_are_free(f"ReplicaContext.{what}")
            return
        where = "outside every strategy" if frame is None else frame.describe()
        raise ContextError(
            f"ReplicaContext.{what} was called {where}, on the context of a step that is not "
            "running here.\n\n"
            "A replica context belongs to the step that requested it, and ends with it.\n\n"
            "Call jaxdist.get_replica_context() inside the function that you pass to "
            "strategy.run, and use it there."
        )

    def __repr__(self) -> str:
        return f"ReplicaContext({type(self._strategy).__name__}, {self._layout.num_replicas})"
