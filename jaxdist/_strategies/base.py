"""`Strategy`, the base class of all strategies."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NoReturn, Self, final

import jax

from jaxdist import _checks, _collectives, _compat, _processes, _replica, data
from jaxdist._called import call_as, called, refuse
from jaxdist._collectives import ReduceOp
from jaxdist._hooks import COMPILE_FOR, MAKE_STRATEGY
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import EAGERLY, Program, Runner, RunOptions, variables_as_values
from jaxdist._strategies.across import in_merge as merged
from jaxdist._strategies.across import local
from jaxdist._strategies.across.calls import GATHER, REDUCE, AcrossReplicas, Method
from jaxdist._strategies.contexts import (
    CALL_BEFORE_RUN,
    Scope,
    advise_replica_method,
    check_across,
    check_lower,
    check_next,
    check_not_in_function,
    check_run,
    check_scope,
)
from jaxdist._strategies.extended.extended import StrategyExtended
from jaxdist._strategies.extended.strategy_v1 import StrategyMethodsV1
from jaxdist._strategies.over_processes import BetweenProcesses, check_limit
from jaxdist._strategies.properties import StrategyProperties
from jaxdist._typing import PyTree
from jaxdist._validate import check_call_arguments, check_callable, log_without_effect
from jaxdist.errors import ArgumentTypeError, ContextError, UnsupportedError

_raw_frame = _replica.FRAME.get
_ref = weakref.ref
_USE_ALL_REDUCE = advise_replica_method("all_reduce")
_USE_ALL_GATHER = advise_replica_method("all_gather")


class Strategy(StrategyProperties, StrategyMethodsV1):
    """The base class of strategies, which run copies of a step (the replicas) together.

    Laws (`tests/strategies/` checks them on every strategy):
        1. `run` passes each replica its own part of a per-replica value, in replica order, and
           the whole of a mirrored value.
        2. A result that is proved to be equal on all replicas is a plain array; every other
           result is a `PerReplica`.
        3. `reduce` and `gather` return what NumPy returns for the concatenated values of the
           replicas.
        4. A step on R replicas returns what `OneDeviceStrategy` returns on the same global batch.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(w, x):
        ...     return get_replica_context().all_reduce("mean", w * x)
        >>> float(strategy.run(step, (2.0, PerReplica([1.0, 3.0]))))
        4.0

    Source:
        `tf.distribute.Strategy`.
    """

    # The strategy whose steps this one runs: `check_gradients` runs them on a one-device twin.
    stands_for: Any = None
    # Whether variables are on parameter servers, so that workers do not step together.
    _has_servers: bool = False

    # A check that raises an error in contexts where no batch of a distributed dataset can be read.
    @property
    def _check_next(self) -> Callable[..., None]:
        return check_next

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ArgumentTypeError(
            f"{type(self).__name__} is not made directly.\n\n"
            "It is the base class of strategies, and has no devices.\n\n"
            "Make a MirroredStrategy or a OneDeviceStrategy; the default one is "
            "jaxdist.get_strategy() outside every scope."
        )

    @final
    @called(lambda self: type(self).__name__)
    def _set_up(
        self, layout: ReplicaMesh, communication: _collectives.Communication | None = None
    ) -> None:
        MAKE_STRATEGY.call()
        self.communication = dataclasses.replace(
            communication or _collectives.Communication(), is_shared=layout.is_shared
        )
        seconds = self.communication.options.timeout_seconds
        check_limit(seconds)
        if layout.is_shared and seconds != layout.timeout_seconds:
            layout = dataclasses.replace(layout, timeout_seconds=seconds)
        self.layout = layout
        self._runner = Runner(self)
        self._known = self._runner.known
        self._extended = StrategyExtended(self)
        self._across = AcrossReplicas(layout, self.communication)
        self._drift = _checks.DriftChecks(layout)
        # None for a strategy of one process, which waits for nobody. Options of one call come on
        # top of those of the strategy.
        self._between = BetweenProcesses(layout) if layout.is_shared else None
        if layout.is_shared:
            _processes.watch()

    def _on(
        self, layout: ReplicaMesh, communication: _collectives.Communication | None = None
    ) -> Self:
        """Return a strategy of this type, with the same options, on another layout.

        The two strategies share no programs. A constructor would search for devices again.

        Args:
            layout: The other layout.
            communication: How the new strategy communicates; None means as this strategy does.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._set_up(layout, communication or self.communication)
        return other

    @property
    def extended(self) -> StrategyExtended:
        """The documented lower-level interface of this strategy.

        Example:
            >>> len(MirroredStrategy().extended.worker_devices)
            8
        """
        return self._extended

    # Context

    @final
    def scope(self) -> Scope["Strategy"]:
        """Make this the current strategy in a block; its first device is the default device there.

        A `Variable` is mirrored over all devices immediately. Other arrays, including those of NNX
        modules, are copied to the other devices when a step first takes them. A step that takes the
        same array again copies nothing. JAX has no default sharding over several devices for the
        results of its functions (`jax.set_mesh` sets a mesh for all functions, and then JAX refuses
        to compute on the value of one replica). To replicate arrays immediately, use
        `jax.device_put(tree, strategy.replicated_sharding)`, or `partition.place`.

        Returns:
            A context manager that yields this strategy. It may be entered several times.

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
        # The devices of a described slice cannot hold arrays, so JAX's default device stays.
        first = self.layout.first_device if self.layout.described is None else None
        here = jax.default_device(first) if first is not None else contextlib.nullcontext()
        with _replica.enter_frame(_replica.Frame(self)), here:
            yield self

    # Running

    @called("strategy.run")
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *more: Any,
    ) -> Any:
        """Run `fn` once on every replica, as one compiled program.

        `fn` is traced once for each new structure, shape, dtype and sharding of its arguments. In
        a merge function it becomes part of the surrounding step: arrays that it computes are
        returned as `PerReplica`, and `options` have no effect, which is logged once.

        Shapes:
            A `PerReplica`, or an array with `per_replica_sharding`, is split: global
            `[R*b, ...]` is `[b, ...]` in `fn`. Every other array is passed whole to all replicas.
            NNX objects are passed whole and updated in place.

        Cost:
            One dispatch, and only the collectives that `fn` calls (NNX batch statistics and
            metrics are combined by one collective each). Host arrays are copied to the devices.

        Args:
            fn: The step. Arguments that are booleans, strings, enums, bytes, functions or other
                objects that are not pytrees are static; numbers and arrays are traced.
            args: Positional arguments, a list or tuple.
            kwargs: Keyword arguments.
            options: Which arguments to donate, and which numbers are static.
            *more: Takes no values; it exists to raise a clear error for `run(step, a, b, c, d)`.

        Returns:
            The results of `fn`. Arrays that are proved to be equal on all replicas are plain
            replicated arrays, and all others are `PerReplica`. Python constants are unchanged.

        Raises:
            StateDivergenceError: State would differ between replicas.
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
        # This method runs at every step, so the common case comes first and is inlined. An exact
        # type check is faster than `isinstance`; other types take the slower path below.
        try:
            merging = check_run(self) if _raw_frame() is not None or _replica.ambient else None
            if more or type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
                is_argument = bool(more) or not isinstance(options, RunOptions | None)
                check_call_arguments(args, kwargs, (options, *more) if is_argument else ())
            if merging is not None:
                check_callable(fn)
                if options is not None:
                    why = "what it runs is part of the program around it"
                    call_as("strategy.run in a merge function", log_without_effect, "options", why)
                return merged.run(self, merging, fn, args, kwargs)
            # Only functions are looked up here: the runner decides how other callables (bound
            # methods, partials, NNX modules) are identified.
            is_plain = options is None and type(fn) is FunctionType and not EAGERLY
            step = self._known.get(_ref(fn)) if is_plain else None
            if step is not None:
                call = step.call
            else:
                check_callable(fn)
                if EAGERLY:
                    step = self._runner.step(fn, options)
                    return step.op_by_op(tuple(args), dict(kwargs or {}))
                call = self._runner.find_call(fn, options)
            if self._between is not None:
                seconds = self.communication.options.timeout_seconds
                return self._between.run(call, fn, args, kwargs, seconds)
            return call(*args, **kwargs) if kwargs else call(*args)
        except Exception as error:
            # The C++ call path cannot name arguments, so the cause is found after the failure, and
            # steps that succeed do not pay for it.
            better = self._runner.explain(error, fn, args, kwargs, options)
            if better is None:
                _compat.hide_frames(error)
                raise
            _compat.hide_frames(better)
            raise better from error

    @final
    @_compat.with_hidden_frames
    @called("strategy.lower", replaces="strategy.run")
    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Program:
        """Return the program that `run` would execute, without running it; donate nothing.

        Cost:
            A trace; no compilation and no collective. Arguments may be `jax.ShapeDtypeStruct`s
            instead of arrays.

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
        check_call_arguments(args, kwargs)
        check_callable(fn)
        program = self._runner.program(fn, args, kwargs, options)
        # Planning is a higher room, so it is called through a hook.
        planner = functools.partial(COMPILE_FOR.call, self, fn, options)
        return dataclasses.replace(program, planner=planner)

    @final
    @_compat.with_hidden_frames
    @_compat.outside_of_meshes
    @called("strategy.check_gradients")
    def check_gradients(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        *,
        rtol: float = 1e-3,
    ) -> "_checks.GradientReport":
        """Compare one step on the replicas with the same global batch on one device.

        It finds gradients that are summed instead of averaged, divided twice, or weighted by
        replica instead of by example.

        Shapes:
            Per-replica values and batches, `[b, ...]` on each replica, are `[R*b, ...]` on the
            one device.

        Cost:
            A step on the replicas (`run` reuses that program) and one on the first device, which
            must hold the whole batch; a copy of the compared arrays to the host.

        Guarantees:
            Nothing is donated, and NNX objects do not change: both steps run on copies.

        Args:
            fn: As for `run`: a step that updates NNX objects, returns new state, or returns
                gradients. It is traced twice.
            args: As for `run`, for instance `(model, optimizer, batch)` or `(state, batch)`.
            kwargs: As for `run`.
            options: As for `run`; `donate_argnums` has no effect, which is logged once.
            rtol: The largest difference that counts as equal, relative to the largest change of
                the leaf.

        Returns:
            A `GradientReport`: print it, read `.is_equal` and `.factor`, or call
            `.raise_if_different()`. For state, its changes are compared; for other results, their
            values, if they are equal on all replicas.

        Raises:
            ArgumentError: Nothing to compare, a step that uses `Variable`s or returns another
                structure on one device, or an `rtol` that is not between 0 and 1.
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
        check_call_arguments(args, kwargs)
        check_callable(fn)
        # `check_gradients` rejects options of the wrong type.
        if isinstance(options, RunOptions) and options.donate_argnums:
            log_without_effect("donate_argnums", "both steps run on copies")
        return _checks.check_gradients(self, fn, args, dict(kwargs or {}), options, rtol)

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
        """Reduce the values of all replicas to one value.

        Shapes:
            `axis=None`: `[...]` on each replica gives `[...]`. With `axis`, those dims of each
            local value are reduced too. The mean is over all elements, so replicas with more rows
            have more weight.

        Cost:
            Small values (up to 64 KiB in total) are added on the host, without a collective;
            larger ones in one program on the devices.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            value: Pytree of `PerReplica` or arrays.
            axis: Dims of the local values to reduce too, or None.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree of plain, uncommitted arrays.

        Raises:
            ArgumentError: Unknown op, or the sum of a value that is not distributed.
            ShapeError: An axis outside the rank, or shapes or dtypes that differ between
                replicas; the message names all such leaves.
            ReplicaValueError: A Python integer, or a sum of integers, beyond JAX's integer dtype.
            ContextError: Inside a replica; use `ReplicaContext.all_reduce` there.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> float(strategy.reduce("MEAN", PerReplica([np.ones(3), np.full(1, 5.0)]), axis=0))
            2.0

        Source:
            `tf.distribute.Strategy.reduce`.
        """
        frame = check_across(self, "reduce", _USE_ALL_REDUCE)
        given = (options, experimental_hints)
        return self._combine(REDUCE, value, axis, given, frame, reduce_op)

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
            value: Pytree of `PerReplica`, or of arrays replicated over the strategy's devices (a
                value of every replica). A value that is not distributed is returned unchanged.
            axis: Dim to concatenate on; negative counts from the end.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree of plain, uncommitted arrays.

        Raises:
            ShapeError: Scalars, an axis outside the rank, or dtypes, or sizes of other dims, that
                differ between replicas; the message names all such leaves.
            ContextError: Inside a replica; use `ReplicaContext.all_gather` there. Or a traced
                array of `jax.jit` that may be a value of every replica: JAX does not show where
                it is. `PerReplica.of_global(x)` gathers rows.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.gather(PerReplica([np.array([1]), np.array([2, 3])]), axis=0)
            Array([1, 2, 3], dtype=int32)

        Source:
            `tf.distribute.Strategy.gather`.
        """
        frame = check_across(self, "gather", _USE_ALL_GATHER)
        return self._combine(GATHER, value, axis, (options, experimental_hints), frame)

    def _limit_step(self, fn: Any, seconds: float) -> None:
        """Set the time limit of a step that the options of its collectives ask for."""
        if self._between is not None:
            self._between.limit(fn, seconds)

    @_compat.outside_of_meshes
    @called(lambda method: method.caller)
    def _combine(
        self, method: Method, value: PyTree, axis: Any, options: Any, frame: Any, op: Any = None
    ) -> PyTree:
        if self._between is None or (frame is not None and frame.in_merge):
            return self._across.combine(method, value, axis, options, frame, op)
        # Wrong options raise in `combine`.
        given = [getattr(x, "timeout_seconds", None) for x in options]
        own = self.communication.options.timeout_seconds
        seconds = next((x for x in given if x is not None), own)
        check_limit(seconds)
        return self._between.combine(
            method.caller,
            functools.partial(self._across.combine, method, value, axis, options, frame, op),
            seconds,
        )

    @final
    @_compat.outside_of_meshes
    def experimental_local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Return the values of the replicas in this process, one entry for each replica.

        Cost:
            None; inside a merge function an all-gather.

        Args:
            value: Any pytree. A value that is not distributed gives one entry; a pytree gives one
                entry for each replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> strategy.experimental_local_results({"a": PerReplica([1, 2]), "b": 3})
            ({'a': 1, 'b': 3}, {'a': 2, 'b': 3})

        Source:
            `tf.distribute.Strategy.experimental_local_results`.
        """
        check_not_in_function(self)
        return local.list_results(variables_as_values(value), self.layout)

    @final
    @called("experimental_distribute_values_from_function")
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[data.ValueContext], PyTree]
    ) -> PyTree:
        """Make per-replica values by calling `value_fn` once for each replica of this process.

        Shapes:
            Arrays `[b, ...]` of one shape and dtype become one global array `[R*b, ...]`, and
            scalars `[R]`. Arrays of different shapes, Python numbers and other objects stay
            separate, one for each replica.

        Cost:
            One copy of each array to its replica's devices; steps that take it copy nothing.

        Args:
            value_fn: Function of a `ValueContext`; it runs outside every strategy.

        Returns:
            A pytree with the structure that `value_fn` returned and `PerReplica` leaves.

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
        check_callable(value_fn, "value_fn")
        # As documented, `value_fn` runs outside every strategy: each call makes the value of one
        # replica, not of all.
        with _replica.enter_frame(None):
            return local.make_from_function(value_fn, self.layout, unwrap=self._unwraps)

    # Whether the devices need static shapes, as XLA on TPUs does.
    _requires_static_shapes = False

    def _hosts_of_replicas(self) -> list[Any]:
        """Return an identifier of the host of each replica, in replica order."""
        return list(self.layout.replica_owners)

    # Whether per-replica values are plain values, as in OneDeviceStrategy and the default strategy.
    @property
    def _unwraps(self) -> bool:
        return False

    @final
    def experimental_distribute_dataset(
        self, dataset: Any, options: data.InputOptions | None = None
    ) -> Any:
        """Split every global batch of `dataset` over the replicas, and prefetch.

        Shapes:
            Global `[B, ...]` gives a `PerReplica` of `[ceil(B/R), ...]`; the last replicas may
            have fewer rows or none. With one replica the batches are plain arrays.

        Cost:
            One host-to-device copy per leaf, in a background thread.

        Args:
            dataset: Iterable of pytrees of arrays, each one global batch: arrays in memory
                (`jaxdist.data.batches`), lists, loaders, Grain and `tf.data` datasets.
            options: Depth of the prefetch, target of batches, the treatment of a batch that the
                number of replicas does not divide (`PartialBatch`), and what each process of a job
                reads (`AutoShardPolicy`).

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
        return data.distribute_dataset(
            dataset, self.layout, options, check_context=self._check_next
        )

    @final
    @called("distribute_datasets_from_function")
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[data.InputContext], Any],
        options: data.InputOptions | None = None,
    ) -> Any:
        """Distribute consecutive elements of the dataset that `dataset_fn` returns to the replicas.

        Shapes:
            `R` consecutive elements `[b, ...]` give one `PerReplica` of `[b, ...]`; replicas
            without an element in the last step get `[0, ...]`.

        Cost:
            One host-to-device copy per leaf, in a background thread.

        Args:
            dataset_fn: Function of an `InputContext`, called once in each process. It returns a
                dataset; each element is the batch of one replica of that process.
            options: Depth of the prefetch, target of batches, and the treatment of an incomplete
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
        check_callable(dataset_fn, "dataset_fn")
        options = data.checked_options(options)
        if self._unwraps and options.is_per_replica:
            raise call_as(
                f"{type(self).__name__}.distribute_datasets_from_function",
                refuse,
                "InputReplicationMode.PER_REPLICA, and it has one replica.",
                "PER_REPLICA makes one dataset for each of several replicas.",
                "Leave experimental_replication_mode out.",
                kind=UnsupportedError,
            )
        dataset_fn = self._adapt_dataset_fn(dataset_fn, options)
        return data.distribute_datasets_from_function(
            dataset_fn, self.layout, options, check_context=self._check_next
        )

    def _adapt_dataset_fn(
        self, dataset_fn: Callable[[data.InputContext], Any], options: data.InputOptions
    ) -> Callable[[data.InputContext], Any]:
        """Return a dataset function that is called with the context of this process's mesh."""
        return dataset_fn

    @_compat.outside_of_meshes
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
            "A copy would share compiled programs, which belong to one strategy.\n\n"
            "Use copy.deepcopy(strategy), or make a second strategy."
        )

    def __reduce__(self) -> NoReturn:
        raise ContextError(
            f"A {type(self).__name__} was pickled.\n\n"
            "It has devices, which belong to this process.\n\n"
            "Make the strategy again where it is needed."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        memo[id(self)] = other = self._on(self.layout)
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.layout!r})"
