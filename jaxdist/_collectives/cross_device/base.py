"""The base class of all `CrossDeviceOps`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist._called import called, refuse
from jaxdist._collectives.across.gather import gather_across
from jaxdist._collectives.across.kinds import Request
from jaxdist._collectives.across.slices import scale_rows
from jaxdist._collectives.across.together import check_together
from jaxdist._collectives.cross_device.values import (
    as_per_replica,
    count_replicas,
    find_layout,
    find_target,
    gather_handle,
    local_shape,
    put_on_target,
    read_slices,
)
from jaxdist._collectives.in_replica import check_results, gather_dim
from jaxdist._collectives.options import CommunicationOptions, read_options
from jaxdist._collectives.reduction import ReduceOp, check_integer, check_supported
from jaxdist._collectives.reduction import reduce_op as _read_op
from jaxdist._validate import show
from jaxdist._values import Handle, IndexedSlices, PerReplica, is_per_replica
from jaxdist.errors import ReplicaValueError, UnsupportedError


class CrossDeviceOps:
    """Ops that reduce, gather and broadcast values of replicas; a base class for your own.

    `MirroredStrategy(cross_device_ops=...)` takes an object of a subclass. `run`, `reduce` and
    `reduce_to` then use it. A subclass overrides `reduce_implementation`, or
    `batch_reduce_implementation` to get all leaves of an all-reduce at once.

    Inside a step, jaxdist calls these methods once while it traces the step, in cross-replica
    context, with `PerReplica` handles. `.values` of a handle are the values of all replicas (an
    all-gather). Every replica gets the returned value.

    Example:
        >>> class Largest(CrossDeviceOps):
        ...     def reduce_implementation(self, op, value, destinations, options):
        ...         return jnp.max(jnp.stack(value.values), axis=0)
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=Largest())
        >>> def step(x):
        ...     return get_replica_context().all_reduce("sum", x)
        >>> int(strategy.run(step, (PerReplica([3, 7]),)))
        7

    Source:
        `tf.distribute.CrossDeviceOps`.
    """

    @called(lambda self: f"{type(self).__name__}.reduce")
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> Any:
        """Combine the values of all replicas, and put the result on `destinations`.

        Shapes:
            `[...]` on each replica gives `[...]`. `IndexedSlices` of `n_r` rows on replica r give
            `n_0 + n_1 + ...` rows, in replica order. For a mean, the rows are divided by the number
            of replicas.

        Args:
            reduce_op: `ReduceOp.SUM`, `ReduceOp.MEAN`, or the name of one in any case.
            per_replica_value: A `PerReplica`, also of `IndexedSlices`, or an array laid out over
                replicas. Any other array is the value of one replica, and is returned.
            destinations: A device or its name, or a distributed value or list of devices. The
                result is on all of these devices.
            options: `experimental.CommunicationOptions`. They never change the result.
            experimental_hints: The older name of `options`.

        Returns:
            An array on the destinations, or `IndexedSlices` of arrays there.

        Raises:
            ReplicaValueError: The value cannot be a `PerReplica`, or there are too few devices for
                its values. Only some replicas have slices, or their whole arrays differ. A subclass
                returns something other than an array of the value's shape.
            ContextError: The call is in a step, outside of a merge function.
            ArgumentError: The op or the destinations do not exist.
            ShapeError: Shapes or dtypes differ between replicas.
            UnsupportedError: The class does not implement a reduction.

        Example:
            >>> total = NcclAllReduce().reduce("SUM", PerReplica([1, 2]), ["cpu:0", "cpu:1"])
            >>> int(total), len(total.devices())
            (3, 2)

        Source:
            `tf.distribute.CrossDeviceOps.reduce`.
        """
        op, chosen = _read_op(reduce_op), read_options(options, experimental_hints)
        # Wrong destinations are an error before any value is moved. The mesh is not known yet.
        find_target(destinations, None)
        slices = read_slices("per_replica_value", per_replica_value)
        if slices is not None:
            return self._reduce_slices("per_replica_value", op, slices, destinations, chosen)
        value = as_per_replica("per_replica_value", per_replica_value)
        check_together({"per_replica_value": value})
        result = self.reduce_implementation(op, value, destinations, chosen)
        check_results(self, [result], [local_shape(value)])
        return result

    @called(lambda self: f"{type(self).__name__}.batch_reduce")
    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> list[Any]:
        """Reduce several pairs of value and destinations together.

        Args:
            reduce_op: As for `reduce`.
            value_destination_pairs: List or tuple of `(value, destinations)`.
            options: As for `reduce`.
            experimental_hints: As for `reduce`.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ArgumentError: `value_destination_pairs` is not a list or tuple of pairs.
            ShapeError: Values differ between replicas. The message names all of them.

        Example:
            >>> a, b = PerReplica([1, 2]), PerReplica([3, 4])
            >>> devices = ["cpu:0", "cpu:1"]
            >>> [int(x) for x in NcclAllReduce().batch_reduce("SUM", [(a, devices), (b, devices)])]
            [3, 7]

        Source:
            `tf.distribute.CrossDeviceOps.batch_reduce`.
        """
        op, chosen = _read_op(reduce_op), read_options(options, experimental_hints)
        pairs = check_pairs(value_destination_pairs)
        for _, d in pairs:
            find_target(d, None)
        names = [f"value_destination_pairs[{i}][0]" for i in range(len(pairs))]
        sparse = [read_slices(n, v) for n, (v, _) in zip(names, pairs, strict=True)]
        named = {
            i: (as_per_replica(names[i], v), d)
            for i, (v, d) in enumerate(pairs)
            if sparse[i] is None
        }
        check_together({f"value {i}": v for i, (v, _) in named.items()})
        dense: list[Any] = []
        if named or not pairs:
            dense = self.batch_reduce_implementation(op, list(named.values()), chosen)
            check_results(self, dense, [local_shape(v) for v, _ in named.values()])
        # Dense values and slices are reduced in different ways, and return in the order of the
        # pairs.
        found = dict(zip(named, dense, strict=True))
        return [
            found[i]
            if slices is None
            else self._reduce_slices(names[i], op, slices, pairs[i][1], chosen)
            for i, slices in enumerate(sparse)
        ]

    @called(lambda self: f"{type(self).__name__}.reduce")
    def _reduce_slices(
        self,
        name: str,
        op: ReduceOp,
        slices: IndexedSlices,
        destinations: Any,
        options: CommunicationOptions,
    ) -> IndexedSlices:
        """Concatenate the rows of all replicas; for a mean, divide them by the replicas."""
        values = as_per_replica(f"{name}.values", slices.values)
        indices = as_per_replica(f"{name}.indices", slices.indices)
        whole = []
        for part in (values, indices):
            gather_dim(name, local_shape(part), 0)
            whole.append(self.gather_implementation(part, destinations, 0, options))
        return slices.with_parts(scale_rows(op, whole[0], count_replicas(values)), whole[1])

    @called(lambda self: f"{type(self).__name__}.broadcast")
    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Return one value on all of `destinations`.

        Cost:
            A copy to each device; none inside a step.

        Args:
            tensor: An array.
            destinations: As for `reduce`.

        Returns:
            The array on the destinations.

        Raises:
            ArgumentError: The value is a `PerReplica`, or the destinations do not exist.
            ArgumentTypeError: JAX has no arrays of this dtype.
            ReplicaValueError: A subclass returns something other than the value that it got.

        Example:
            >>> len(CrossDeviceOps().broadcast(1.0, ["cpu:0", "cpu:1"]).devices())
            2

        Source:
            `tf.distribute.CrossDeviceOps.broadcast`.
        """
        find_target(destinations, None)
        leaves = jax.tree.flatten_with_path(tensor, is_leaf=is_per_replica)[0]
        for path, leaf in leaves:
            _check_one("tensor" + jax.tree_util.keystr(path), leaf)
        result = self.broadcast_implementation(tensor, destinations)
        _check_broadcast(f"{type(self).__name__}.broadcast_implementation", result, tensor)
        return result

    @called(lambda self: f"{type(self).__name__}.gather")
    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int,
        options: Any = None,
        *,
        experimental_hints: Any = None,
    ) -> Any:
        """Concatenate the values of all replicas on `axis`, and put the result on `destinations`.

        Shapes:
            `[..., n_r, ...]` on replica r gives `[..., n_0 + n_1 + ..., ...]`.

        Args:
            per_replica_value: As for `reduce`.
            destinations: As for `reduce`.
            axis: The dim to concatenate on.
            options: As for `reduce`.
            experimental_hints: As for `reduce`.

        Returns:
            An array on the destinations.

        Raises:
            ShapeError: The values are scalars, the axis is outside of the rank, or the shapes
                differ on other dims.

        Example:
            >>> rows = PerReplica([np.zeros(1), np.ones(2)])
            >>> CrossDeviceOps().gather(rows, "cpu:0", axis=0).tolist()
            [0.0, 1.0, 1.0]

        Source:
            `tf.distribute.CrossDeviceOps._gather`.
        """
        chosen = read_options(options, experimental_hints)
        value = as_per_replica("per_replica_value", per_replica_value)
        find_target(destinations, None)
        gather_dim("per_replica_value", local_shape(value), axis)
        return self.gather_implementation(value, destinations, axis, chosen)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value. Override this method; its arguments are those of `reduce`, checked.

        Raises:
            UnsupportedError: The class does not override it.

        Source:
            `tf.distribute.CrossDeviceOps.reduce_implementation`.
        """
        # The default `batch_reduce_implementation` calls this method, so this would never end.
        if type(self).batch_reduce_implementation is not CrossDeviceOps.batch_reduce_implementation:
            pairs = [(per_replica_value, destinations)]
            results = self.batch_reduce_implementation(reduce_op, pairs, options)
            check_results(self, results, [local_shape(per_replica_value)])
            return results[0]
        raise UnsupportedError(
            f"{type(self).__name__} was used for a reduction, and it has no reduce_implementation."
            "\n\nA subclass of CrossDeviceOps defines how values are reduced.\n\n"
            "Override reduce_implementation(reduce_op, per_replica_value, destinations, options), "
            "or batch_reduce_implementation."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce several values together. Override this method; by default it reduces one by one.

        Source:
            `tf.distribute.CrossDeviceOps.batch_reduce_implementation`.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    @called(lambda self: f"{type(self).__name__}.broadcast")
    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Put a value on its destinations. Override this method to change how.

        Source:
            `tf.distribute.CrossDeviceOps.broadcast_implementation`.
        """
        return put_on_target(tensor, find_target(destinations, None))

    @called(lambda self: f"{type(self).__name__}.gather")
    def gather_implementation(
        self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions
    ) -> Any:
        """Concatenate values. Override this method to change how.

        Source:
            `tf.distribute.CrossDeviceOps._gather_implementation`.
        """
        if isinstance(per_replica_value, Handle):
            return gather_handle(per_replica_value, axis)
        layout = find_layout([per_replica_value], [destinations])
        request = Request(axis, layout)
        whole = gather_across(request, "per_replica_value", per_replica_value)
        return put_on_target(whole, find_target(destinations, layout))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _check_one(name: str, leaf: Any) -> None:
    """Refuse a leaf that is not one array."""
    if isinstance(leaf, PerReplica):
        raise refuse(
            f"{name}={leaf!r}, a PerReplica.",
            "A broadcast copies one value, and a PerReplica has one for each replica.",
            "Reduce it first: ops.reduce('MEAN', value, destinations).",
        )
    check_integer(f"cannot broadcast {name}", leaf)
    check_supported(f"cannot broadcast {name}", leaf)


def _check_broadcast(what: str, result: Any, tensor: Any) -> None:
    """Refuse a result whose structure or shapes differ from those of the broadcast value."""
    wanted, found = (jax.tree.flatten_with_path(x) for x in (tensor, result))
    if found[1] != wanted[1]:
        raise ReplicaValueError(
            f"{what} returned {result!r}, of type {type(result).__name__}.\n\n"
            "It returns a value of the structure that it was given.\n\n"
            f"Return a pytree with the structure {wanted[1]}."
        )
    for (path, have), (_, given) in zip(found[0], wanted[0], strict=True):
        if np.shape(have) != np.shape(given):
            raise ReplicaValueError(
                f"{what} returned tensor{jax.tree_util.keystr(path)} of shape "
                f"{list(np.shape(have))}, and it was given {list(np.shape(given))}.\n\n"
                "It returns the array that it was given, on the destinations.\n\n"
                f"Return an array of shape {list(np.shape(given))}."
            )


def check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Return `pairs` as a list, or raise an error with the wrong value."""
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs
    ):
        return [(v, d) for v, d in pairs]
    raise refuse(
        f"value_destination_pairs={show(pairs)}.",
        "value_destination_pairs is a list or tuple of pairs.",
        "Pass [(value, destinations), ...].",
    )
