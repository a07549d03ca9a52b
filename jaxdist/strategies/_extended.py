"""The documented lower-level view of a strategy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdist import collectives, replica, runtime
from jaxdist._typing import PyTree
from jaxdist.collectives import ReduceOp
from jaxdist.errors import ArgumentError, ArgumentTypeError, DeviceError
from jaxdist.strategies import _in_merge
from jaxdist.values import PerReplica


class StrategyExtended:
    """A thin view of a strategy that exists because it is documented; `strategy.extended`.

    Example:
        >>> MirroredStrategy(["cpu:0", "cpu:1"]).extended.worker_devices[1]
        '/job:localhost/replica:0/task:0/device:CPU:1'

    Source:
        `tf.distribute.StrategyExtended`.
    """

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Full names of the devices that replicas run on, replica by replica.

        Example:
            >>> OneDeviceStrategy("cpu:3").extended.worker_devices
            ('/job:localhost/replica:0/task:0/device:CPU:3',)
        """
        return tuple(runtime.device_name(d) for d in self._strategy.layout.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Full names of the devices that hold variables: those that replicas run on.

        Example:
            >>> OneDeviceStrategy("cpu:3").extended.parameter_devices
            ('/job:localhost/replica:0/task:0/device:CPU:3',)
        """
        return self.worker_devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes must be known when a step is compiled; always, on XLA.

        Example:
            >>> MirroredStrategy().extended.experimental_require_static_shapes
            True
        """
        return True

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Any,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> PyTree:
        """Combine `value` over replicas and put the result where `destinations` says.

        Cost:
            As `Strategy.reduce` with `axis=None`, and one copy to the destination.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            value: Pytree of `PerReplica` or arrays.
            destinations: A device or its name; or a distributed value, and then the result is
                mirrored over the strategy's devices.
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
        caller = "StrategyExtended.reduce_to"
        target = self._destination(caller, destinations)
        collectives.hints_of(caller, options, experimental_hints)
        reduced = self._strategy.reduce(reduce_op, value, axis=None)
        return self._put(reduced, target)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[PyTree]:
        """`reduce_to` for several pairs of value and destination, in order.

        Cost:
            That of `reduce_to` for each.

        Args:
            reduce_op: As for `reduce_to`.
            value_destination_pairs: List or tuple of `(value, destinations)`.
            options: As for `reduce_to`.
            experimental_hints: As for `reduce_to`.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ArgumentTypeError: Not a list or tuple of pairs.

        Example:
            >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
            >>> a = PerReplica([1, 2])
            >>> [int(x) for x in strategy.extended.batch_reduce_to("SUM", [(a, a), (a, "cpu:0")])]
            [3, 3]

        Source:
            `tf.distribute.StrategyExtended.batch_reduce_to`.
        """
        caller = "StrategyExtended.batch_reduce_to"
        pairs = value_destination_pairs
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs
        ):
            raise ArgumentTypeError(
                f"{caller} takes a list or tuple of (value, destinations) pairs, and {pairs!r} "
                "was given.\n\nPass [(value, destinations), ...]."
            )
        collectives.hints_of(caller, options, experimental_hints)
        targets = [self._destination(caller, d) for _, d in pairs]
        return [
            self._put(self._strategy.reduce(reduce_op, v, axis=None), t)
            for (v, _), t in zip(pairs, targets, strict=True)
        ]

    def broadcast_to(self, tensor: PyTree, destinations: Any) -> PyTree:
        """Put one value on all the devices that `destinations` names.

        Cost:
            One copy to each device; inside a merge function none.

        Args:
            tensor: Pytree of arrays.
            destinations: A device or its name; or a distributed value or a list of the strategy's
                devices, and then the result is mirrored over the strategy's devices.

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
        caller = "StrategyExtended.broadcast_to"
        frame = self._strategy._check_across(
            "extended.broadcast_to", "Inside a replica call it in a merge_call."
        )
        target = self._destination(caller, destinations)
        if frame is not None and frame.in_merge:
            return _in_merge.broadcast(tensor)
        return self._put(tensor, target)

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`Strategy.run` under its older name.

        Example:
            >>> MirroredStrategy().extended.call_for_each_replica(lambda x: x + 1, args=(1,))
            Array(2, dtype=int32, weak_type=True)

        Source:
            `tf.compat.v1.distribute.StrategyExtended.call_for_each_replica`.
        """
        return self._strategy.run(fn, args, kwargs)

    def _destination(self, caller: str, destinations: Any) -> Any:
        """A device, or the strategy's replicated layout."""
        replicated = self._strategy.layout.replicated
        if isinstance(destinations, (str, jax.Device)):
            if destinations == "":
                raise ArgumentError(
                    f"{caller} was given empty destinations.\n\n"
                    "Name a device ('cpu:0'), or pass a distributed value."
                )
            return runtime.device_from_name(destinations)
        if isinstance(destinations, (PerReplica, jax.Array)):
            return replicated
        if isinstance(destinations, (list, tuple)) and destinations:
            devices = [runtime.device_from_name(d) for d in destinations]
            if set(devices) == set(self._strategy.layout.devices):
                return replicated
            if len(devices) == 1:
                return devices[0]
            raise DeviceError(
                f"{caller} was given {len(devices)} destinations that are not the strategy's own "
                f"devices: {[str(d) for d in devices]}.\n\nName one device, or all of "
                f"{[str(d) for d in self._strategy.layout.devices]}."
            )
        raise ArgumentTypeError(
            f"{caller} was given destinations={destinations!r} of type "
            f"{type(destinations).__name__}.\n\n"
            "Destinations are a device, the name of one, or a distributed value."
        )

    def _put(self, value: PyTree, target: Any) -> PyTree:
        frame = replica.current_frame()
        if frame is not None and frame.in_merge:
            return value
        return jax.tree.map(lambda x: jax.device_put(x, target), value)

    def __repr__(self) -> str:
        return f"StrategyExtended({self._strategy!r})"
