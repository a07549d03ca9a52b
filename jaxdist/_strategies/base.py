"""What every strategy does."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, final

import jax

from jaxdist import _collectives, _compat, _replica, data, explain
from jaxdist._checks import DriftChecks, GradientReport, check_gradients
from jaxdist._collectives import ReduceOp
from jaxdist._hooks import COMPILE_FOR
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import EAGERLY, Program, Runner, RunOptions, variables_as_values
from jaxdist._strategies.across import in_merge as merged
from jaxdist._strategies.across import local, reduce_and_gather
from jaxdist._strategies.extended.extended import StrategyExtended
from jaxdist._strategies.extended.strategy_v1 import StrategyMethodsV1
from jaxdist._strategies.properties import StrategyProperties
from jaxdist._strategies.scope import Scope
from jaxdist._strategies.where_called import (
    CALL_BEFORE_RUN,
    advise_replica_method,
    check_across,
    check_lower,
    check_next,
    check_not_in_function,
    check_run,
    check_scope,
)
from jaxdist._typing import PyTree
from jaxdist._validate import Renamed, call_arguments, is_callable, tell_without_effect
from jaxdist.errors import ArgumentTypeError, ContextError, UnsupportedError

_raw_frame = _replica.FRAME.get
_ref = weakref.ref


class Strategy(StrategyProperties, StrategyMethodsV1):
    """Copies of a step, the replicas, that run together; made through its subclasses.

    Laws (`tests/strategies/` runs them on every strategy):
        1. `run` gives each replica its own part of a per-replica value, in replica order, and
           the whole of a mirrored one.
        2. A result that is proved to be the same on all replicas is a plain array; every other
           is a `PerReplica`.
        3. `reduce` and `gather` give what NumPy gives for the values of the replicas put
           together.
        4. A step on R replicas gives what `OneDeviceStrategy` gives on the same global batch.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(w, x):
        ...     return get_replica_context().all_reduce("mean", w * x)
        >>> float(strategy.run(step, (2.0, PerReplica([1.0, 3.0]))))
        4.0

    Source:
        `tf.distribute.Strategy`.
    """

    # Of one that runs the steps of another: `check_gradients` runs them on one device.
    stands_for: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ArgumentTypeError(
            f"{type(self).__name__} is not made directly.\n\n"
            "It is the base class of strategies, and has no devices.\n\n"
            "Make a MirroredStrategy or a OneDeviceStrategy; the default one is "
            "jaxdist.get_strategy() outside every scope."
        )

    @final
    def _set_up(
        self, layout: ReplicaMesh, communication: _collectives.Communication | None = None
    ) -> None:
        self.layout = layout
        self.communication = communication or _collectives.Communication()
        self._runner = Runner(self)
        self._known = self._runner.known
        self._extended = StrategyExtended(self)
        self._drift = DriftChecks(layout)

    @property
    def extended(self) -> StrategyExtended:
        """The documented lower-level view of this strategy.

        Example:
            >>> len(MirroredStrategy().extended.worker_devices)
            8
        """
        return self._extended

    # Context

    @final
    def scope(self) -> Scope["Strategy"]:
        """Make this the current strategy for a block; arrays made in it lie on its first device.

        A `Variable` is mirrored over all devices at once. Other arrays, those of NNX modules
        among them, are copied to the other devices when a step first takes them, and a step that
        takes the same array again copies nothing. JAX lets nobody choose a layout over several
        devices for what its functions make (a mesh for all of them, `jax.set_mesh`, would refuse
        to compute on the value of one replica). To lay arrays out at once, use
        `jax.device_put(tree, strategy.replicated_sharding)`, or `partition.place`.

        Returns:
            A context manager that gives this strategy. It may be entered several times.

        Raises:
            MixedStrategyError: Another strategy is current.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy()
            >>> with strategy.scope():
            ...     get_strategy() is strategy, in_cross_replica_context()
            (True, True)

        Source:
            `tf.distribute.Strategy.scope`.
        """
        return Scope(self._in_scope)

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator["Strategy"]:
        check_scope(self)
        # A description holds no arrays: they stay where JAX puts them.
        first = self.layout.devices[0] if self.layout.described is None else None
        here = jax.default_device(first) if first is not None else contextlib.nullcontext()
        with _replica.entered(_replica.Frame(self)), here:
            yield self

    # Running

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run `fn` once on every replica, as one compiled program.

        `fn` is traced once, for each new structure, shape, dtype and layout of its arguments. In
        a merge function it becomes part of the step around it: arrays that it computes come back
        as `PerReplica`, and `options` have no effect, which is logged once.

        Shapes:
            A `PerReplica`, or an array laid out as `per_replica_sharding`, is split: global
            `[R*b, ...]` is `[b, ...]` in `fn`. Every other array is given whole to all replicas.
            NNX objects are given whole and updated in place.

        Cost:
            One dispatch; the collectives that `fn` asks for and no other (NNX batch statistics
            and metrics are combined by one each). Host arrays are copied to the devices.

        Args:
            fn: The step. Booleans, strings, enums, bytes, functions and other objects that are
                no pytrees are part of the program; numbers and arrays are traced.
            args: Positional arguments, a list or tuple.
            kwargs: Keyword arguments.
            options: What to donate, and which numbers are part of the program.

        Returns:
            What `fn` returned. Arrays that are proved to be the same on all replicas are plain
            replicated arrays, all others `PerReplica`; Python constants come back as they are.

        Raises:
            StateDivergenceError: State would come out different on each replica.
            DivergentCollectiveError: A collective that some replicas might not reach.
            ReplicaValueError: A `PerReplica` of another strategy, or with too few values.
            ShapeError: Per-replica values of different shapes.
            DonationError: One buffer donated twice, or donated before.
            ContextError: Inside a replica.
            MixedStrategyError: Under another strategy's scope.

        Example:
            >>> strategy = MirroredStrategy()
            >>> x = jax.device_put(np.arange(16.0), strategy.per_replica_sharding)
            >>> strategy.run(lambda x: x.sum(), (x,))
            PerReplica(1.0, 5.0, 9.0, 13.0, 17.0, 21.0, 25.0, 29.0)

        Source:
            `tf.distribute.Strategy.run`; `jax.jit(jax.shard_map(...))`.
        """
        # Every line here is paid at every step, so what is usual is asked first.
        try:
            merging = check_run(self) if _raw_frame() is not None or _replica.ambient else None
            if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
                call_arguments("strategy.run", args, kwargs)
            if merging is not None:
                is_callable("strategy.run", fn)
                if options is not None:
                    why = "what it runs is part of the program around it"
                    tell_without_effect("strategy.run in a merge function", "options", why)
                return merged.run(self, merging, fn, args, kwargs)
            if EAGERLY:
                return self._run_eagerly(fn, args, kwargs, options)
            if options is not None:
                call = self._call_with(fn, options)
            else:
                step = self._known.get(_ref(fn)) if type(fn) is FunctionType else None
                call = self._call_of(fn) if step is None else step.call
            return call(*args, **kwargs) if kwargs else call(*args)
        except Exception as error:
            better = self._runner.explain(error, fn, args, kwargs, options)
            if better is None:
                _compat.hide_frames(error)
                raise
            _compat.hide_frames(better)
            raise better from error

    def _run_eagerly(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        options: RunOptions | None,
    ) -> Any:
        is_callable("strategy.run", fn)
        return self._runner.op_by_op(fn, args, kwargs, options)

    def _call_of(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        is_callable("strategy.run", fn)
        return self._runner.call_of(fn)

    def _call_with(self, fn: Callable[..., Any], options: RunOptions) -> Callable[..., Any]:
        is_callable("strategy.run", fn)
        return self._runner.call_with(fn, options)

    @final
    @_compat.hides_frames
    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Program:
        """The program that `run` would execute, without running it; nothing is donated.

        Cost:
            A trace; no compilation and no collective. `jax.ShapeDtypeStruct`s may stand for
            arrays.

        Args:
            fn: As for `run`.
            args: As for `run`.
            kwargs: As for `run`.
            options: As for `run`.

        Returns:
            A `Program`: `repr`, `.inputs`, `.results`, `.collectives`, `.compile()`.

        Raises:
            Everything that `run` raises before it computes.

        Example:
            >>> print(MirroredStrategy().lower(lambda x: x + 1, (1.0,)))
            Program <lambda> for 8 replica(s) x 1 logical device(s) on cpu
              inputs:
                args[0]: mirrored float32[]
              results:
                result: mirrored float32[]
              collectives:
                none
        """
        check_lower(self)
        call_arguments("strategy.lower", args, kwargs)
        is_callable("strategy.lower", fn)
        with Renamed("strategy.run ", "strategy.lower "):
            program = self._runner.program(fn, args, kwargs, options)
        return dataclasses.replace(program, planner=self._planner(fn, options))

    def _planner(
        self, fn: Callable[..., Any], options: RunOptions | None
    ) -> Callable[..., explain.SlicePlan]:
        return functools.partial(COMPILE_FOR, self, fn, options)

    @final
    @_compat.hides_frames
    def check_gradients(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        rtol: float = 1e-3,
    ) -> GradientReport:
        """Compare one step on the replicas with the same global batch on one device.

        Finds gradients that are summed where they should be averaged, divided twice, or weighted
        by replica instead of by example.

        Shapes:
            Per-replica values and batches, `[b, ...]` on each replica, are `[R*b, ...]` on the
            one device.

        Cost:
            A step on the replicas (`run` uses that program again) and one on the first device,
            which has to hold the whole batch; a copy of what is compared to the host.

        Guarantees:
            Nothing is donated, and NNX objects stay as they are: both steps run on copies.

        Args:
            fn: As for `run`: a step that updates NNX objects, returns new state, or returns
                gradients. It is traced twice.
            args: As for `run`, for instance `(model, optimizer, batch)` or `(state, batch)`.
            kwargs: As for `run`.
            options: As for `run`; `donate_argnums` has no effect, which is logged once.
            rtol: How far a leaf may be off, of its largest movement.

        Returns:
            A `GradientReport`: print it, ask `.is_equal` and `.factor`, or call
            `.raise_if_different()`. Of state, what is compared is how far it moved; of other
            results, their value where it is the same on all replicas.

        Raises:
            ArgumentError: Nothing to compare, or `rtol` is not between 0 and 1.
            ShapeError: A `PerReplica` of scalars, which have no rows to join.
            ContextError: Inside a replica, or with replicas in other processes.

        Example:
            >>> def step(w, x):
            ...     context = get_replica_context()
            ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean(w * x))(w)
            ...     return w - 0.1 * context.all_reduce("sum", grads)
            >>> strategy = MirroredStrategy()
            >>> x = jax.device_put(np.arange(16.0, dtype="float32"), strategy.per_replica_sharding)
            >>> report = strategy.check_gradients(step, (1.0, x))
            >>> report.is_equal, round(report.factor)
            (False, 8)
        """
        check_across(self, "check_gradients", "Call it outside strategy.run, on the step.")
        call_arguments("strategy.check_gradients", args, kwargs)
        is_callable("strategy.check_gradients", fn)
        if isinstance(options, RunOptions) and options.donate_argnums:
            why = "both steps run on copies"
            tell_without_effect("strategy.check_gradients", "donate_argnums", why)
        return check_gradients(self, fn, args, dict(kwargs or {}), options, rtol)

    # Across replicas

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | tuple[int, ...] | None,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Combine the values of all replicas into one.

        Shapes:
            `axis=None`: `[...]` on each replica gives `[...]`. With `axis`, those dims of each
            local value are reduced too; the mean is over all elements, so replicas with more
            rows count for more.

        Cost:
            Small values (up to 64 KiB in all) are added on the host, without a collective;
            larger ones in one program on the devices.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            value: Pytree of `PerReplica` or arrays.
            axis: Dims of the local values to reduce as well, or None.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree of plain arrays, tied to no device.

        Raises:
            ArgumentError: Unknown op, or the sum of a value that is not distributed.
            ShapeError: An axis outside the rank, or shapes or dtypes that differ between
                replicas; all leaves that do are named.
            ReplicaValueError: A Python integer, or a sum of them, beyond JAX's integer dtype.
            ContextError: Inside a replica; use `ReplicaContext.all_reduce` there.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> float(strategy.reduce("MEAN", PerReplica([np.ones(3), np.full(1, 5.0)]), axis=0))
            2.0

        Source:
            `tf.distribute.Strategy.reduce`.
        """
        frame = check_across(self, "reduce", advise_replica_method("all_reduce"))
        value = variables_as_values(value)
        op = _collectives.reduce_op("Strategy.reduce", reduce_op)
        in_merge = frame is not None and frame.in_merge
        packs = in_merge or self.communication.ops is not None
        chosen = self.communication.asked(
            "Strategy.reduce", options, experimental_hints, packs=packs
        )
        where = merged if in_merge else reduce_and_gather
        return where.reduce(op, value, axis, self.layout, self.communication, chosen)

    @final
    def gather(
        self, value: PyTree, axis: int, options: Any = None, *, experimental_hints: Any = None
    ) -> PyTree:
        """Concatenate the values of all replicas on `axis`, in replica order.

        Shapes:
            `[..., n_r, ...]` on replica r gives `[..., n_0 + n_1 + ..., ...]`.

        Cost:
            One copy from the devices; no collective in one process.

        Args:
            value: Pytree of `PerReplica`, or arrays replicated over the strategy's devices (which
                every replica has). A value that is not distributed comes back unchanged.
            axis: Dim to concatenate on; negative counts from the end.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree of plain arrays, tied to no device.

        Raises:
            ShapeError: Scalars, an axis outside the rank, or dtypes, or shapes elsewhere, that
                differ between replicas; all leaves that do are named.
            ContextError: Inside a replica; use `ReplicaContext.all_gather` there.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.gather(PerReplica([np.array([1]), np.array([2, 3])]), axis=0)
            Array([1, 2, 3], dtype=int32)

        Source:
            `tf.distribute.Strategy.gather`.
        """
        frame = check_across(self, "gather", advise_replica_method("all_gather"))
        value = variables_as_values(value)
        chosen = self.communication.asked("Strategy.gather", options, experimental_hints)
        ops = self.communication.ops
        own = ops if _collectives.overrides(ops, "gather_implementation") else None
        where = merged if frame is not None and frame.in_merge else reduce_and_gather
        return where.gather(value, axis, self.layout, own, chosen)

    @final
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """The values of this process's replicas, one entry for each.

        Cost:
            None; inside a merge function an all-gather.

        Args:
            value: Any pytree. A value that is not distributed has one entry; a pytree has one
                for each replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_local_results({"a": PerReplica([1, 2]), "b": 3})
            ({'a': 1, 'b': 3}, {'a': 2, 'b': 3})

        Source:
            `tf.distribute.Strategy.experimental_local_results`.
        """
        check_not_in_function(self, "experimental_local_results")
        return local.list_results(variables_as_values(value), self.layout)

    @final
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[data.ValueContext], PyTree]
    ) -> PyTree:
        """Make per-replica values by calling `value_fn` once for each replica of this process.

        Shapes:
            Arrays `[b, ...]` of one shape and dtype are one global array `[R*b, ...]`, scalars
            `[R]`. Arrays of different shapes, Python numbers and other objects are held as they
            are, one for each replica.

        Cost:
            One copy of each array to its replica's devices; steps that take it copy nothing.

        Args:
            value_fn: Function of a `ValueContext`; it runs outside every strategy.

        Returns:
            A pytree like the one returned, with `PerReplica` leaves.

        Raises:
            ReplicaValueError: The structures returned for two replicas differ.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_distribute_values_from_function(
            ...     lambda ctx: ctx.replica_id_in_sync_group * 10)
            PerReplica(0, 10)

        Source:
            `tf.distribute.Strategy.experimental_distribute_values_from_function`.
        """
        check_across(self, "experimental_distribute_values_from_function", CALL_BEFORE_RUN)
        is_callable("experimental_distribute_values_from_function", value_fn, "value_fn")
        with _replica.entered(None):
            return local.make_from_function(value_fn, self.layout, unwrap=self._unwraps)

    # Whether shapes are known when a program is made for the devices, as XLA on TPUs needs.
    _requires_static_shapes = False

    def _hosts_of_replicas(self) -> list[Any]:
        """What tells the hosts of the replicas apart, replica by replica."""
        return [device.process_index for device in self.layout.device_grid[:, 0]]

    # Whether one replica's values come bare, as OneDeviceStrategy and the default strategy do.
    @property
    def _unwraps(self) -> bool:
        return False

    @final
    def experimental_distribute_dataset(
        self, dataset: Any, options: data.InputOptions | None = None
    ) -> Any:
        """Split every global batch of `dataset` over the replicas, ahead of use.

        Shapes:
            Global `[B, ...]` gives a `PerReplica` of `[ceil(B/R), ...]`, of which the last
            replicas may have fewer rows, or none; with one replica, plain arrays.

        Cost:
            One host-to-device copy per leaf, in a background thread.

        Args:
            dataset: Iterable of pytrees of arrays, each one global batch: arrays in memory
                (`jaxdist.data.batches`), lists, loaders, Grain and `tf.data` datasets.
            options: Depth of the prefetch, where batches go, and what becomes of a batch that
                does not divide by the replicas (`PartialBatch`).

        Returns:
            A `DistributedDataset`.

        Raises:
            ShapeError: While iterating, for a batch that cannot be split.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> for batch in strategy.experimental_distribute_dataset([np.arange(4)]):
            ...     print(batch)
            PerReplica([0, 1], [2, 3])

        Source:
            `tf.distribute.Strategy.experimental_distribute_dataset`.
        """
        check_across(self, "experimental_distribute_dataset", CALL_BEFORE_RUN)
        return data.distribute_dataset(dataset, self.layout, options, check_context=check_next)

    @final
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[data.InputContext], Any],
        options: data.InputOptions | None = None,
    ) -> Any:
        """Give consecutive elements of the dataset that `dataset_fn` makes to the replicas.

        Shapes:
            `R` consecutive elements `[b, ...]` give one `PerReplica` of `[b, ...]`; replicas for
            which none is left get `[0, ...]`.

        Cost:
            One host-to-device copy per leaf, in a background thread.

        Args:
            dataset_fn: Function of an `InputContext`, called once; each element of what it
                returns is the batch of one replica.
            options: Depth of the prefetch, where batches go, and what becomes of an incomplete
                last step (`PartialBatch`).

        Returns:
            A `DistributedDataset`.

        Raises:
            ShapeError: While iterating, for elements of one step that differ in more than rows.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> batches = strategy.distribute_datasets_from_function(
            ...     lambda ctx: [np.full(ctx.get_per_replica_batch_size(4), i) for i in range(2)])
            >>> for batch in batches:
            ...     print(batch)
            PerReplica([0, 0], [1, 1])

        Source:
            `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        check_across(self, "distribute_datasets_from_function", CALL_BEFORE_RUN)
        is_callable("distribute_datasets_from_function", dataset_fn, "dataset_fn")
        options = data.checked_options("distribute_datasets_from_function", options)
        if self._unwraps and _is_per_replica_input(options):
            raise UnsupportedError(
                f"{type(self).__name__}.distribute_datasets_from_function was given "
                "InputReplicationMode.PER_REPLICA, and it has one replica.\n\n"
                "PER_REPLICA makes one dataset for each of several replicas.\n\n"
                "Leave experimental_replication_mode out."
            )
        return data.distribute_datasets_from_function(
            dataset_fn, self.layout, options, check_context=check_next
        )

    def check_replicas(self, state: PyTree, every: int = 1) -> bool:
        """Compare the bits of mirrored state on all replicas; see `jaxdist.check_replicas`.

        Example:
            >>> strategy = MirroredStrategy()
            >>> strategy.check_replicas(jax.device_put(np.ones(3), strategy.replicated_sharding))
            True
        """
        return self._drift.check(state, every)

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"copy.copy was called on a {type(self).__name__}.\n\n"
            "A copy would share the compiled programs of the strategy, which belong to one.\n\n"
            "Use copy.deepcopy(strategy), or make a second strategy."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        other: Strategy = object.__new__(type(self))
        memo[id(self)] = other
        other._set_up(self.layout, self.communication)
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout!r})"


def _is_per_replica_input(options: data.InputOptions | None) -> bool:
    mode = data.InputReplicationMode.PER_REPLICA
    return options is not None and options.experimental_replication_mode is mode
