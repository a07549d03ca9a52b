"""A second evaluation of a trace, with some operations replaced."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.logical.rewrite import Rewrite, find_stages
from jaxdist._program.nnx.graph_rules import Combination, combine
from jaxdist._program.state.no_rows import replicas_with_rows
from jaxdist._program.trace.trace import Signature, TracedStep


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """A trace that is evaluated again to combine NNX variables and to rewrite operations."""

    layout: ReplicaMesh
    signature: Signature
    traced: TracedStep
    combined: tuple[Combination, ...]

    @property
    def is_needed(self) -> bool:
        """Whether the trace must be changed. Otherwise it is called as it is."""
        return bool(self.combined) or self._is_rewritten

    @functools.cached_property
    def _is_rewritten(self) -> bool:
        """Whether some operation cannot run unchanged, or XLA would compile it wrongly."""
        return self._rewrite.applies_to(self.traced.jaxpr)

    @functools.cached_property
    def _rewrite(self) -> Rewrite:
        # XLA's CPU backend cannot reduce bf16 with automatic axes, and the collectives of its CPU
        # and GPU backends lose nan in `pmax` and `pmin`.
        platform = self.layout.platform
        several = self.layout.num_replicas > 1
        return Rewrite(
            frozenset(self.layout.mesh.axis_names) - self.traced.manual_axes,
            widens=platform == "cpu",
            keeps_nan=several and platform != "tpu",
            stages=find_stages(self.layout),
        )

    def call(self, leaves: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        """Run on global arrays, with the results laid out by `specs`."""
        traced, layout = self.traced, self.layout
        count = len(leaves)
        takes_part = replicas_with_rows(self.signature, layout.num_replicas)

        # The inputs are all leaves, with the old values of variables, then the trace's operands.
        def replica(*local: Any) -> list[Any]:
            if self._is_rewritten:
                results = self._rewrite.call(traced.jaxpr, local[count:])
            else:
                results = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, ()))(*local[count:])
            # The old values of variables are among the leaves, the new ones among the results.
            for c in self.combined:
                before, after = [local[i] for i in c.numbers], [results[i] for i in c.numbers]
                made = combine(c, before, after, layout.replica_axes, takes_part)
                for i, value in zip(c.numbers, made, strict=True):
                    results[i] = value
            return results

        mapped = jax.shard_map(
            replica,
            mesh=layout.mesh if traced.is_explicit else layout.auto_mesh,
            in_specs=(
                *(i.placement.manual_spec(layout) for i in self.signature.inputs),
                *traced.eqn.params["in_specs"],
            ),
            out_specs=list(specs),
            axis_names=traced.manual_axes,
            check_vma=False,
        )
        return mapped(*leaves, *traced.given(leaves))
