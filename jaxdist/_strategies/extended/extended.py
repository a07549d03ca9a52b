"""`StrategyExtended`, the documented lower-level interface of a strategy."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from jaxdist import _collectives, _replica
from jaxdist._called import called, refuse, refuse_type
from jaxdist._collectives import ReduceOp
from jaxdist._devices import runtime
from jaxdist._strategies.across import in_merge as merged
from jaxdist._strategies.contexts import check_across
from jaxdist._strategies.extended.version_1_members import ExtendedV1
from jaxdist._typing import PyTree
from jaxdist._validate import (
    as_arrays,
    as_flag,
    as_list,
    check_call_arguments,
    check_callable,
    check_instance,
    show,
)
from jaxdist._values import Variable, copy_if_writable, put, refuse_leaked
from jaxdist.errors import ContextError

_INSIDE = (
    "Inside a replica use jaxdist.get_replica_context().all_reduce, or call it in a merge_call."
)


class StrategyExtended(ExtendedV1):
    """The lower-level interface of a strategy that TensorFlow documents; `strategy.extended`.

    Example:
        >>> MirroredStrategy(["cpu:0", "cpu:1"]).extended.worker_devices[1]
        '/job:localhost/replica:0/task:0/device:CPU:1'

    Source:
        `tf.distribute.StrategyExtended`.
    """

    __slots__ = ("_strategy",)

    @called("StrategyExtended")
    def __init__(self, strategy: Any) -> None:
        # An `isinstance` check would need `Strategy`, whose module imports this one.
        if not hasattr(strategy, "run"):
            raise refuse_type(
                f"strategy={show(strategy)}.",
                "It belongs to a strategy, which makes it.",
                "Use strategy.extended.",
            )
        self._strategy = strategy

    @property
    def worker_devices(self) -> Sequence[str]:
        """Full names of the devices that replicas run on, replica by replica.

        A tuple; for a `CentralStorageStrategy` a list, as in TensorFlow.

        Example:
            >>> OneDeviceStrategy("cpu:3").extended.worker_devices
            ('/job:localhost/replica:0/task:0/device:CPU:3',)
        """
        layout = self._strategy.layout
        names = [runtime.device_name(d) for d in layout.devices]
        return names if layout.variables_on is not None else tuple(names)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Full names of the devices that hold variables: the devices of the replicas.

        For a `CentralStorageStrategy`, the one device that keeps them.

        Example:
            >>> OneDeviceStrategy("cpu:3").extended.parameter_devices
            ('/job:localhost/replica:0/task:0/device:CPU:3',)
        """
        on = self._strategy.layout.variables_on
        if on is not None:
            return tuple(runtime.device_name(d) for d in on.device_set)
        return tuple(self.worker_devices)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether the devices run programs of static shapes only, as TPUs do.

        On other devices an iterator may return batches of any shape; a step is compiled for each.

        Example:
            >>> MirroredStrategy().extended.experimental_require_static_shapes
            False

        Source:
            `tf.distribute.StrategyExtended.experimental_require_static_shapes`.
        """
        return bool(self._strategy._requires_static_shapes)

    @called("StrategyExtended.reduce_to", replaces="Strategy.reduce")
    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Any,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Reduce `value` over replicas and put the result on `destinations`.

        Cost:
            That of `Strategy.reduce` with `axis=None`, and one copy to the destination.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            value: Pytree of `PerReplica` or arrays.
            destinations: A device or its name; or a distributed value, which mirrors the result
                over the strategy's devices.
            options: Communication options; they never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            Pytree of arrays on the destination.

        Raises:
            ArgumentError: Unknown op, or empty destinations.
            ContextError: Inside a replica.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> total = strategy.extended.reduce_to("SUM", PerReplica([1, 2]), "cpu:1")
            >>> int(total), total.devices() == {jax.devices()[1]}
            (3, True)

        Source:
            `tf.distribute.StrategyExtended.reduce_to`.
        """
        check_across(self._strategy, "extended.reduce_to", _INSIDE)
        reduce_op = _collectives.reduce_op(reduce_op)
        target = _collectives.target_in_strategy(destinations, self._strategy.layout)
        chosen = _collectives.read_options(options, experimental_hints)
        reduced = self._strategy.reduce(reduce_op, value, axis=None, options=chosen)
        return self._put_on_target(reduced, target)

    @called("StrategyExtended.batch_reduce_to", replaces="Strategy.reduce")
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[PyTree]:
        """Call `reduce_to` for several pairs of value and destination, in order.

        Cost:
            That of one `reduce_to` of all values: one all-reduce inside a merge function.

        Args:
            reduce_op: As for `reduce_to`.
            value_destination_pairs: List or tuple of `(value, destinations)`.
            options: As for `reduce_to`.
            experimental_hints: As for `reduce_to`.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ArgumentError: Not a list or tuple of pairs.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> a = PerReplica([1, 2])
            >>> [int(x) for x in strategy.extended.batch_reduce_to("SUM", [(a, a), (a, "cpu:0")])]
            [3, 3]

        Source:
            `tf.distribute.StrategyExtended.batch_reduce_to`.
        """
        check_across(self._strategy, "extended.batch_reduce_to", _INSIDE)
        reduce_op = _collectives.reduce_op(reduce_op)
        pairs = _collectives.check_pairs(value_destination_pairs)
        chosen = _collectives.read_options(options, experimental_hints)
        layout = self._strategy.layout
        targets = [_collectives.target_in_strategy(d, layout) for _, d in pairs]
        # The list is one pytree, so one `reduce` can pack all values.
        values = [v for v, _ in pairs]
        reduced = self._strategy.reduce(reduce_op, values, axis=None, options=chosen)
        return [self._put_on_target(v, t) for v, t in zip(reduced, targets, strict=True)]

    @called("StrategyExtended.broadcast_to")
    def broadcast_to(self, tensor: PyTree, destinations: Any) -> PyTree:
        """Copy one value to all devices in `destinations`.

        Cost:
            One copy to each device; inside a merge function none.

        Args:
            tensor: Pytree of arrays.
            destinations: A device or its name; or a distributed value or a list of the strategy's
                devices, which mirrors the result over the strategy's devices.

        Returns:
            Pytree of arrays on the destination.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> x = strategy.extended.broadcast_to(np.ones(2), PerReplica([0, 0]))
            >>> strategy.experimental_local_results(x)[1].tolist()
            [1.0, 1.0]

        Source:
            `tf.distribute.StrategyExtended.broadcast_to`.
        """
        frame = check_across(
            self._strategy, "extended.broadcast_to", "Inside a replica call it in a merge_call."
        )
        target = _collectives.target_in_strategy(destinations, self._strategy.layout)
        # See Note [Merge functions].
        if frame is not None and frame.in_merge:
            tensor = merged.broadcast(tensor)
        tensor = as_arrays("tensor", tensor)
        ops = self._strategy.communication.ops
        if ops is not None and _collectives.has_override(ops, "broadcast_implementation"):
            return jax.tree.map(lambda leaf: ops.broadcast(leaf, destinations), tensor)
        if frame is not None and frame.in_merge:
            return tensor
        return self._put_on_target(tensor, target)

    @called("StrategyExtended.update")
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` once for each copy of `var`, on its replica.

        In `fn`, reading `var` returns the copy of that replica, and assigning changes only that
        copy, without aggregation. The new copies of a mirrored variable must be equal.

        Cost:
            A step; no collective of its own, but inside a step `group=False` is an all-gather.

        Args:
            var: A variable of this strategy.
            fn: Function of the variable and the arguments.
            args: Positional arguments; each call gets its own value of a `PerReplica`.
            kwargs: Keyword arguments, in the same way.
            group: Whether to return the results as one value, as `run` does.

        Returns:
            The results of `fn`, as `run` returns them; with `group=False`, a tuple with one entry
            for each replica.

        Raises:
            ArgumentTypeError: `var` is not a variable.
            StateDivergenceError: The copies of a mirrored variable would differ.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     w = Variable(1.0)
            ...     w_new = strategy.extended.update(w, lambda v, x: v.assign_add(x), args=(2.0,))
            >>> float(w_new)
            3.0

        Source:
            `tf.distribute.StrategyExtended.update`.
        """
        _check_variable(var, "var")
        check_callable(fn)
        check_call_arguments(args, kwargs)
        return self._update_copies(fn, var, args, kwargs, as_flag("group", group))

    def value_container(self, value: Any) -> Any:
        """Return the variable that contains a value; in jaxdist every value is its own container.

        Example:
            >>> v = Variable(1.0)
            >>> MirroredStrategy().extended.value_container(v) is v
            True

        Source:
            `tf.distribute.StrategyExtended.value_container`.
        """
        return value

    @called("StrategyExtended.read_var")
    def read_var(self, v: Variable) -> Any:
        """Return the value of a variable, as `v.read_value()` does.

        Raises:
            ArgumentTypeError: `v` is not a variable.

        Example:
            >>> MirroredStrategy().extended.read_var(Variable(1.0))
            Array(1., dtype=float32)

        Source:
            `tf.compat.v1.distribute.StrategyExtended.read_var`.
        """
        _check_variable(v)
        return v.read_value()

    @called("StrategyExtended.variable_created_in_scope")
    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether a variable was made in the scope of this strategy.

        Raises:
            ArgumentTypeError: `v` is not a variable.

        Example:
            >>> strategy = MirroredStrategy()
            >>> with strategy.scope():
            ...     v = Variable(1.0)
            >>> strategy.extended.variable_created_in_scope(v)
            True

        Source:
            `tf.distribute.StrategyExtended.variable_created_in_scope`.
        """
        _check_variable(v)
        return v.distribute_strategy is self._strategy

    @contextlib.contextmanager
    @called("StrategyExtended.colocate_vars_with")
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Place the variables made in a block on the devices of a variable of this strategy.

        With parameter servers, they are on the server of that variable. Other strategies keep all
        variables on all their devices, so with them this only checks its argument.

        Raises:
            ContextError: Outside the scope of this strategy.
            ArgumentError: Not a variable of this strategy.

        Example:
            >>> strategy = MirroredStrategy()
            >>> with strategy.scope():
            ...     v = Variable(1.0)
            ...     with strategy.extended.colocate_vars_with(v):
            ...         momentum = Variable(0.0)

        Source:
            `tf.distribute.StrategyExtended.colocate_vars_with`.
        """
        # An ambient strategy counts too: variables are mirrored under it, as in a scope.
        frame = _replica.current_frame()
        name = type(self._strategy).__name__
        if frame is None or frame.strategy is not self._strategy or frame.is_inside_step:
            where = "outside every strategy" if frame is None else frame.describe()
            raise ContextError(
                f"StrategyExtended.colocate_vars_with was called {where}.\n\n"
                "It places new variables, and those of a strategy are made in its scope."
                "\n\nEnter strategy.scope() first."
            )
        given = colocate_with_variable
        if not isinstance(given, Variable) or given.distribute_strategy is not self._strategy:
            raise refuse(
                f"colocate_with_variable={show(given)}.",
                f"It takes a variable that was made in the scope of this {name}.",
                "Make it there, or leave colocate_vars_with out: all variables of a strategy are "
                "on all its devices.",
            )
        with self._place_with(given):
            yield

    def _place_with(self, variable: Variable) -> contextlib.AbstractContextManager[None]:
        """Return a block whose new variables are placed where `variable` is."""
        del variable
        return contextlib.nullcontext()

    @called("StrategyExtended.non_slot_devices")
    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the full names of the devices for state that belongs to no single variable.

        Args:
            var_list: The optimized variables; they are on all devices of the strategy.

        Raises:
            ArgumentTypeError: An element of `var_list` is not a variable.

        Example:
            >>> OneDeviceStrategy("cpu:1").extended.non_slot_devices([])
            ('/job:localhost/replica:0/task:0/device:CPU:1',)

        Source:
            `tf.compat.v1.distribute.StrategyExtended.non_slot_devices`.
        """
        remedy = "Pass for instance var_list=[variable], or [] without variables."
        listed = as_list("var_list", var_list, "a list of variables", remedy)
        for number, v in enumerate(listed):
            _check_variable(v, f"var_list[{number}]")
        return tuple(self.worker_devices)

    @called("StrategyExtended.call_for_each_replica", replaces="strategy.run")
    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `Strategy.run`; this is its older name.

        Example:
            >>> MirroredStrategy().extended.call_for_each_replica(lambda x: x + 1, args=(1,))
            Array(2, dtype=int32, weak_type=True)

        Source:
            `tf.compat.v1.distribute.StrategyExtended.call_for_each_replica`.
        """
        check_callable(fn)
        check_call_arguments(args, kwargs)
        return self._strategy.run(fn, args, kwargs)

    @called("StrategyExtended")
    def _put_on_target(self, value: PyTree, target: Any) -> PyTree:
        frame = _replica.current_frame()
        # In a merge function the result is traced and every replica has it already.
        if frame is not None and frame.in_merge:
            return value
        named, treedef = jax.tree.flatten_with_path(value)
        for path, leaf in named:
            refuse_leaked("value" + keystr(path), leaf)
        return treedef.unflatten([put(copy_if_writable(x), target) for _, x in named])

    def __repr__(self) -> str:
        return f"StrategyExtended({self._strategy!r})"


def _check_variable(value: Any, name: str = "v") -> None:
    remedy = "Make one in the scope of the strategy."
    check_instance(name, value, Variable, "a jaxdist.Variable", remedy)
