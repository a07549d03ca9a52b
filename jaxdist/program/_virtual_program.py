"""A traced step as a function of global arrays, with virtual replicas on each device."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist.program import _graph_rules
from jaxdist.program._trace import Argument, Signature, Traced
from jaxdist.program._virtual import run_virtually
from jaxdist.program._virtual_values import Own, Same, Turns
from jaxdist.values import Kind


def call_virtually(
    traced: Traced,
    signature: Signature,
    leaves: Sequence[Any],
    kinds: Sequence[Kind],
    combined: Mapping[int, type],
    turns: Turns,
) -> list[Any]:
    """Run on flat global arrays.

    Args:
        traced: The step, traced over as many devices as there are virtual replicas.
        signature: Of its inputs.
        leaves: The inputs.
        kinds: Of the results.
        combined: Variables of NNX objects that are brought together after the step.
        turns: The virtual replicas.
    """
    layout = turns.layout
    count = len(leaves)

    def device(*local: Any) -> list[Any]:
        own = [i.kind is not Kind.MIRRORED for i in signature.inputs]
        by_argument = [_held(x, o, turns) for x, o in zip(local[:count], own, strict=True)]
        given = [
            by_argument[o] if type(o) is Argument else Same(x)
            for o, x in zip(traced.operands, local[count:], strict=True)
        ]
        results = run_virtually(traced.jaxpr, given, turns)
        for i, kind in combined.items():
            results[i] = _combined(kind, by_argument[i], results[i], turns)
        return [_global(x, kind, turns) for x, kind in zip(results, kinds, strict=True)]

    constants = [x if type(x) is not Argument else 0 for x in traced.operands]
    spec = layout.replica_spec
    mapped = jax.shard_map(
        device,
        mesh=layout.mesh,
        in_specs=(
            *(i.placement.manual_spec(layout) for i in signature.inputs),
            *(PartitionSpec() for _ in constants),
        ),
        out_specs=[spec if kind is Kind.PER_REPLICA else PartitionSpec() for kind in kinds],
        axis_names=frozenset(layout.mesh.axis_names),
        check_vma=False,
    )
    results: list[Any] = mapped(*leaves, *constants)
    return results


def _held(local: Any, is_own: bool, turns: Turns) -> Same | Own:
    if not is_own:
        return Same(local)
    return Own(local.reshape(turns.here, local.shape[0] // turns.here, *local.shape[1:]))


def _global(held: Same | Own, kind: Kind, turns: Turns) -> Any:
    if kind is not Kind.PER_REPLICA:
        return turns.one(held)
    rows = turns.rows(held)
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _combined(kind: type, before: Same | Own, after: Same | Own, turns: Turns) -> Same | Own:
    """What `_graph_rules.combine` makes of one variable, by the tree."""
    axes = turns.layout.replica_axes

    def combine(first: Any, last: Any) -> Any:
        return _graph_rules.combine(kind, first, last, axes)

    shapes = [turns.rows(x)[0] for x in (before, after)]
    sizes = [(a, turns.layout.traced_mesh.shape[a]) for a in axes]
    program = jax.make_jaxpr(combine, axis_env=sizes)(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes)
    )
    (result,) = run_virtually(program, [before, after], turns)
    return result
