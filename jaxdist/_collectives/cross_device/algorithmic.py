"""`CrossDeviceOps` that are all-reduce algorithms."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist._collectives.across.across import settled
from jaxdist._collectives.across.together import check_sum
from jaxdist._collectives.cross_device.base import CrossDeviceOps
from jaxdist._collectives.cross_device.destinations import placed, target_of
from jaxdist._collectives.cross_device.values import layout_of, on_mesh
from jaxdist._collectives.marks.plan import AllReducePlan
from jaxdist._collectives.marks.reduction import Summing, reduced
from jaxdist._collectives.options.dtypes import of_sum, result_dtype, to_sum
from jaxdist._collectives.options.options import CommunicationOptions
from jaxdist._collectives.options.reduce_op import ReduceOp
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import Form, Handle


class AlgorithmicOps(CrossDeviceOps):
    """Sums leaves by an algorithm, inside a step and outside."""

    takes_bytes_per_pack = False

    @abc.abstractmethod
    def summing(
        self, leaves: Sequence[Any], layout: ReplicaMesh, options: CommunicationOptions
    ) -> tuple[AllReducePlan, Summing]:
        """How leaves, given by shape and dtype, are summed over the replicas of a mesh."""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """All leaves together."""
        return self._reduced("batch_reduce", reduce_op, value_destination_pairs, options)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """A batch of one."""
        if type(self).batch_reduce_implementation is AlgorithmicOps.batch_reduce_implementation:
            return self._reduced("reduce", reduce_op, [(per_replica_value, destinations)], options)[
                0
            ]
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def _reduced(
        self,
        method: str,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        values = [v for v, _ in value_destination_pairs]
        if not values:
            return []
        caller = f"{type(self).__name__}.{method}"
        destinations = [d for _, d in value_destination_pairs]
        layout = layout_of(caller, values, destinations)
        if all(isinstance(v, Handle) for v in values):
            return self.all_reduced(reduce_op, [v.local for v in values], layout, options)
        if reduce_op is ReduceOp.SUM:
            for i, value in enumerate(values):
                check_sum(f"value {i}", value, None, caller)
        placed_values = on_mesh(caller, values, layout)
        scalars = tuple(v.form is Form.SCALARS for v in placed_values)
        program = _program(self, reduce_op, layout, options, scalars)
        totals = program([v.array for v in placed_values])
        targets = [target_of(caller, d, layout) for d in destinations]
        return [placed(settled(x), t) for x, t in zip(totals, targets, strict=True)]

    def all_reduced(
        self,
        op: ReduceOp,
        local: Sequence[jax.Array],
        layout: ReplicaMesh,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Called by every replica with its own leaves, inside a mapped step."""
        arrays = [jnp.asarray(x) for x in local]
        count = layout.num_replicas
        if count == 1 or not arrays:
            return [x.astype(result_dtype(op, x.dtype)) for x in arrays]
        sums = self.sums([to_sum(op, x, count) for x in arrays], layout, options)
        return [of_sum(op, s, x.dtype, count) for s, x in zip(sums, arrays, strict=True)]

    def sums(
        self, arrays: list[jax.Array], layout: ReplicaMesh, options: CommunicationOptions
    ) -> list[jax.Array]:
        """The sums over the replicas, on each of them."""
        plan, how = self.summing(arrays, layout, options)
        if options.bytes_per_pack and not self.takes_bytes_per_pack:
            told = f"bytes_per_pack: {self!r} packs as it was told when it was made"
            plan = dataclasses.replace(plan, ignored=(*plan.ignored, told))
        return reduced(arrays, plan, how)


@functools.lru_cache(maxsize=128)
def _program(
    ops: AlgorithmicOps,
    op: ReduceOp,
    layout: ReplicaMesh,
    options: CommunicationOptions,
    scalars: tuple[bool, ...],
) -> Any:
    """The compiled reduction of global arrays, for ops outside of steps."""

    def local(arrays: list[jax.Array]) -> list[jax.Array]:
        own = [x[0] if s else x for x, s in zip(arrays, scalars, strict=True)]
        return ops.all_reduced(op, own, layout, options)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=layout.replica_spec,
            out_specs=PartitionSpec(),
            axis_names=layout.manual_axes,
            check_vma=False,
        )
    )
