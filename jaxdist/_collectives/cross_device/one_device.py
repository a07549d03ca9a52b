"""The reduction at one device, followed by a broadcast."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from jaxdist._called import called, refuse_type
from jaxdist._collectives.algorithms.algorithm import group_all
from jaxdist._collectives.algorithms.one_level import OneDevice
from jaxdist._collectives.cross_device.algorithmic import AlgorithmicOps
from jaxdist._collectives.in_replica import annotate_errors
from jaxdist._collectives.marks import AllReducePlan, Summing
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.reduction import ReduceOp, result_dtype
from jaxdist._collectives.sums.packing import Entry, SumBySize
from jaxdist._devices import runtime
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import show
from jaxdist.errors import DeviceError, ShapeError


@final
class ReductionToOneDevice(AlgorithmicOps):
    """Ops that copy values to one device, add them there, and copy the sum to all devices.

    Args:
        reduce_to_device: The device, or its name. It must be the device of a replica. None means
            the device of the first replica.
        accumulation_fn: A function of the list of the values of all replicas, in replica order. It
            returns their sum, with the same shape and dtype. None adds the values. For a mean, the
            result is divided by the number of values. Every replica calls it after an all-gather.

    Raises:
        DeviceError: The device does not exist, or (when it is used) no replica runs on it.
        ShapeError: The `accumulation_fn` returns another shape or dtype.
        ArgumentTypeError: `accumulation_fn` is not callable.

    Cost:
        `2 ceil(log2 R)` permutes of all bytes; with an `accumulation_fn` an all-gather,
        `R - 1` times the bytes into each device.

    Example:
        >>> product = ReductionToOneDevice(accumulation_fn=lambda values: values[0] * values[1])
        >>> values = PerReplica([np.array([1.0, 2.0]), np.array([3.0, 5.0])])
        >>> product.reduce("SUM", values, "cpu:0").tolist()
        [3.0, 10.0]

    Source:
        `tf.distribute.ReductionToOneDevice`.
    """

    @called("ReductionToOneDevice")
    def __init__(
        self,
        reduce_to_device: str | jax.Device | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise refuse_type(
                f"accumulation_fn={show(accumulation_fn)}.",
                "accumulation_fn is a function of the list of the values of all replicas, or "
                "None, which adds them.",
                "Pass for instance accumulation_fn=sum, or leave it out.",
            )
        self.reduce_to_device = (
            None
            if reduce_to_device is None
            else runtime.device_from_name(
                reduce_to_device, "ReductionToOneDevice(reduce_to_device=...)"
            )
        )
        self.accumulation_fn = accumulation_fn

    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return the sum by a tree of messages."""
        # The tree ends at the first member of its group, so the groups start with the wanted
        # replica.
        level = group_all(layout).rotate(self._find_root(layout))
        return AllReducePlan("psgpu", f"{self!r}"), SumBySize(level, (Entry(OneDevice()),))

    def sums(
        self, arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
    ) -> list[jax.Array]:
        """Return the sums by a tree of messages, or by the user's function after an all-gather."""
        accumulate = self.accumulation_fn
        if accumulate is None:
            return super().sums(arrays, layout, options)
        # Only for its check: here too, the device must be one of a replica.
        self._find_root(layout)
        return [_accumulate(accumulate, x, layout) for x in arrays]

    def all_reduced(
        self,
        op: ReduceOp,
        local: Sequence[jax.Array],
        layout: ReplicaMesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Reduce leaves. The user's function gets the values, and not shares of a mean."""
        if self.accumulation_fn is None:
            return super().all_reduced(op, local, layout, options)
        arrays = [jnp.asarray(x) for x in local]
        arrays = [x.astype(result_dtype(op, x.dtype)) for x in arrays]
        if layout.num_replicas > 1:
            arrays = self.sums(arrays, layout, options)
        return [x / layout.num_replicas if op is ReduceOp.MEAN else x for x in arrays]

    def _find_root(self, layout: ReplicaMesh) -> int:
        """Return the replica at which the reduction ends."""
        if self.reduce_to_device is None:
            return 0
        for replica in range(layout.num_replicas):
            if self.reduce_to_device in layout.device_grid[replica]:
                return replica
        raise DeviceError(
            f"ReductionToOneDevice(reduce_to_device={str(self.reduce_to_device)!r}): no replica "
            f"runs on this device. They run on {[str(d) for d in layout.devices]}.\n\n"
            "Values are reduced on a device of the strategy.\n\n"
            "Pass one of these devices, or leave reduce_to_device out."
        )

    def __repr__(self) -> str:
        fn = None if self.accumulation_fn is None else _function_name(self.accumulation_fn)
        given = {"reduce_to_device": self.reduce_to_device, "accumulation_fn": fn}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None]
        return f"ReductionToOneDevice({', '.join(shown)})"


def _accumulate(
    accumulate: Callable[[list[Any]], Any], array: jax.Array, layout: ReplicaMesh
) -> jax.Array:
    """Return the result of the user's function of the values of all replicas, checked."""
    rows = jax.lax.all_gather(array, layout.replica_axes)
    what = f"The accumulation_fn {_function_name(accumulate)} of ReductionToOneDevice"
    kind = f"{array.dtype}{list(array.shape)}"
    with annotate_errors(what, f"{layout.num_replicas} values {kind}"):
        result = accumulate([rows[i] for i in range(layout.num_replicas)])
    if isinstance(result, (int, float, complex)):
        # A number that the dtype cannot represent stays as it is. The error below reports it.
        with contextlib.suppress(TypeError, OverflowError):
            result = jnp.asarray(result, array.dtype)
    if not hasattr(result, "dtype") or not hasattr(result, "shape"):
        found = f"{result!r}, of type {type(result).__name__},"
    else:
        result = jnp.asarray(result)
        found = f"{result.dtype}{list(result.shape)}"
        if found == kind:
            return result
    raise ShapeError(
        f"{what} returned {found} for {layout.num_replicas} values {kind}.\n\n"
        f"It returns one array of the shape and dtype of each value: {kind}.\n\n"
        "Reduce over the list alone, for instance sum(values), and cast the result: "
        "result.astype(values[0].dtype)."
    )


def _function_name(fn: Any) -> str:
    """Return the name of a function, for messages."""
    return str(getattr(fn, "__name__", fn))
