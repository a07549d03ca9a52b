"""The base of `CrossDeviceOps` that reduce by an all-reduce algorithm."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist._called import called, name_call
from jaxdist._collectives.across.plain import take_plain_array
from jaxdist._collectives.across.together import check_sum
from jaxdist._collectives.cross_device.base import CrossDeviceOps
from jaxdist._collectives.cross_device.values import (
    find_layout,
    find_target,
    put_on_target,
)
from jaxdist._collectives.marks import AllReducePlan, Summing, bind_all_reduce
from jaxdist._collectives.options import CommunicationOptions
from jaxdist._collectives.reduction import ReduceOp, finish_sum, prepare_summands, result_dtype
from jaxdist._mesh import ReplicaMesh
from jaxdist._validate import as_integer
from jaxdist._values import Form, Handle, place_per_replica, view_auto
from jaxdist.errors import ArgumentError


def check_count(name: str, value: Any, *, least: int) -> int:
    """Return `value` as an integer that is not below `least`."""
    return as_integer(name, value, least=least, wrong_type=ArgumentError)


class AlgorithmicOps(CrossDeviceOps):
    """`CrossDeviceOps` that sum leaves by an algorithm, inside and outside of a step."""

    takes_bytes_per_pack = False

    @abc.abstractmethod
    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """Return the plan and the sum for leaves that are given by shape and dtype."""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce all leaves together."""
        return self._reduce_pairs("batch_reduce", reduce_op, value_destination_pairs, options)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce one value, as a batch of one."""
        # A subclass may override `batch_reduce_implementation` only. Then the base class calls that
        # one.
        if type(self).batch_reduce_implementation is AlgorithmicOps.batch_reduce_implementation:
            return self._reduce_pairs(
                "reduce", reduce_op, [(per_replica_value, destinations)], options
            )[0]
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    @called(lambda self, method: f"{type(self).__name__}.{method}")
    def _reduce_pairs(
        self,
        method: str,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduce pairs of value and destinations."""
        values = [v for v, _ in value_destination_pairs]
        if not values:
            return []
        destinations = [d for _, d in value_destination_pairs]
        layout = find_layout(values, destinations)
        # In a step the values are traced already, and every replica calls the algorithm directly.
        if all(isinstance(v, Handle) for v in values):
            return self.all_reduced(reduce_op, [v.local for v in values], layout, options)
        if reduce_op is ReduceOp.SUM:
            # A Python integer has no dtype yet, so an overflow can still be an error with its name.
            for i, value in enumerate(values):
                check_sum(f"value {i}", value, None)
        caller = name_call()
        placed_values = [
            place_per_replica(f"{caller}: value {i}", v, layout) for i, v in enumerate(values)
        ]
        scalars = tuple(v.form is Form.SCALARS for v in placed_values)
        program = _compile(self, reduce_op, layout, options, scalars)
        # One program for all values, so that their leaves can share packs.
        totals = program([view_auto(v.array) for v in placed_values])
        targets = [find_target(d, layout) for d in destinations]
        return [put_on_target(take_plain_array(x), t) for x, t in zip(totals, targets, strict=True)]

    def all_reduced(
        self,
        op: ReduceOp,
        local: Sequence[jax.Array],
        layout: ReplicaMesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Reduce leaves inside a mapped step; every replica calls this with its own leaves."""
        arrays = [jnp.asarray(x) for x in local]
        count = layout.num_replicas
        if count == 1 or not arrays:
            return [x.astype(result_dtype(op, x.dtype)) for x in arrays]
        sums = self.sums([prepare_summands(op, x, count) for x in arrays], layout, options)
        return [finish_sum(op, s, x.dtype, count) for s, x in zip(sums, arrays, strict=True)]

    def sums(
        self, arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
    ) -> list[jax.Array]:
        """Return the sums over the replicas, on each of them."""
        plan, how = self.summing(arrays, layout, options)
        if options.bytes_per_pack and not self.takes_bytes_per_pack:
            sentence = f"bytes_per_pack: {self!r} packs as its own arguments say"
            plan = dataclasses.replace(plan, ignored=(*plan.ignored, sentence))
        return bind_all_reduce(arrays, plan, how)


# `jax.jit` caches by the function object. `local` is a new object at each call, so without this
# cache every reduction would compile again. The cache is bounded, because it keeps the ops alive.
@functools.lru_cache(maxsize=128)
def _compile(
    ops: AlgorithmicOps,
    op: ReduceOp,
    layout: ReplicaMesh,
    options: CommunicationOptions,
    scalars: tuple[bool, ...],
) -> Any:
    """Return the compiled reduction of global arrays, for ops outside of steps."""

    def local(arrays: list[jax.Array]) -> list[jax.Array]:
        # A global array of scalars has one row for each replica, and the row is the scalar.
        own = [x[0] if s else x for x, s in zip(arrays, scalars, strict=True)]
        return ops.all_reduced(op, own, layout, options)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=layout.auto_mesh,
            in_specs=layout.replica_spec,
            out_specs=PartitionSpec(),
            axis_names=layout.manual_axes,
            check_vma=False,
        )
    )
