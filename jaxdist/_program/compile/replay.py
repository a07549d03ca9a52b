"""Evaluates a trace again, with some operations replaced."""

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


def replay(
    layout: ReplicaMesh,
    signature: Signature,
    traced: TracedStep,
    combined: Sequence[Combination],
    leaves: Sequence[Any],
    specs: Sequence[PartitionSpec],
) -> list[Any] | None:
    """Evaluate a trace again, to combine NNX variables and to rewrite operations.

    Args:
        layout: The layout of the strategy.
        signature: The signature of the program.
        traced: The trace.
        combined: The variables of NNX objects that a collective makes equal.
        leaves: The global arrays.
        specs: The layouts of the results.

    Returns:
        The results, or None if nothing must be changed: the trace can be called as it is.
    """
    # XLA's CPU backend cannot reduce bf16 with automatic axes, and the collectives of its CPU
    # and GPU backends lose nan in `pmax` and `pmin`.
    rewrite = Rewrite(
        frozenset(layout.mesh.axis_names) - traced.manual_axes,
        widens=layout.platform == "cpu",
        keeps_nan=layout.num_replicas > 1 and layout.platform != "tpu",
        stages=find_stages(layout),
    )
    # Whether some operation cannot run unchanged, or XLA would compile it wrongly.
    is_rewritten = rewrite.applies_to(traced.jaxpr)
    if not combined and not is_rewritten:
        return None
    count = len(leaves)
    takes_part = replicas_with_rows(signature, layout.num_replicas)

    # The inputs are all leaves, with the old values of variables, then the trace's operands.
    def replica(*local: Any) -> list[Any]:
        if is_rewritten:
            results = rewrite.call(traced.jaxpr, local[count:])
        else:
            results = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, ()))(*local[count:])
        # The old values of variables are among the leaves, the new ones among the results.
        for c in combined:
            before, after = [local[i] for i in c.numbers], [results[i] for i in c.numbers]
            made = combine(c, before, after, layout.replica_axes, takes_part)
            for i, value in zip(c.numbers, made, strict=True):
                results[i] = value
        return results

    mapped = jax.shard_map(
        replica,
        mesh=layout.mesh if traced.is_explicit else layout.auto_mesh,
        in_specs=(
            *(i.placement.manual_spec(layout) for i in signature.inputs),
            *traced.eqn.params["in_specs"],
        ),
        out_specs=list(specs),
        axis_names=traced.manual_axes,
        check_vma=False,
    )
    return mapped(*leaves, *traced.given(leaves))
