"""A traced step as a function of global arrays, with virtual replicas on each device."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist import _compat
from jaxdist._program.nnx.graph_rules import Combination, combine
from jaxdist._program.state.no_rows import replicas_with_rows
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist._program.virtual.device import Own, Same, VirtualDevice
from jaxdist._program.virtual.program_of_one import run_virtually
from jaxdist._values import Kind


def call_virtually(
    traced: TracedStep,
    signature: Signature,
    leaves: Sequence[Any],
    kinds: Sequence[Kind],
    combined: Sequence[Combination],
    device: VirtualDevice,
) -> list[Any]:
    """Call a step with virtual replicas on flat global arrays.

    Args:
        traced: The step, traced over as many devices as there are virtual replicas.
        signature: The signature of its inputs.
        leaves: The inputs.
        kinds: The kinds of the results.
        combined: How to combine variables of NNX objects after the step.
        device: The virtual replicas of one device.
    """
    layout = device.layout
    count = len(leaves)
    takes_part = replicas_with_rows(signature, layout.num_replicas)

    def run_on_device(*local: Any) -> list[Any]:
        own = [i.kind is not Kind.MIRRORED for i in signature.inputs]
        by_argument = [_to_local(x, o, device) for x, o in zip(local[:count], own, strict=True)]
        given = [
            by_argument[o] if type(o) is Argument else Same(x)
            for o, x in zip(traced.operands, local[count:], strict=True)
        ]
        results = run_virtually(traced.jaxpr, given, device)
        # Inside `shard_map`, so that the combination uses the sums in tree order, too.
        for c in combined:
            before = [by_argument[i] for i in c.numbers]
            after = [results[i] for i in c.numbers]
            made = _combine(c, before, after, takes_part, device)
            for i, value in zip(c.numbers, made, strict=True):
                results[i] = value
        return [_to_global(x, kind, device) for x, kind in zip(results, kinds, strict=True)]

    constants = [x if type(x) is not Argument else 0 for x in traced.operands]
    spec = layout.replica_spec
    mapped = jax.shard_map(
        run_on_device,
        mesh=layout.auto_mesh,
        in_specs=(*signature.manual_specs(layout), *(PartitionSpec() for _ in constants)),
        out_specs=[spec if kind is Kind.PER_REPLICA else PartitionSpec() for kind in kinds],
        check_vma=False,
    )
    # The operations inside were bound one by one, and some lose what JAX notes of Python numbers.
    weak = [bool(getattr(v.aval, "weak_type", False)) for v in traced.jaxpr.outvars]
    results = mapped(*leaves, *constants)
    return [_compat.make_weak(x) if w else x for x, w in zip(results, weak, strict=True)]


def _to_local(local: Any, is_own: bool, device: VirtualDevice) -> Same | Own:
    if not is_own:
        return Same(local)
    return Own(
        local.reshape(device.num_local, local.shape[0] // device.num_local, *local.shape[1:])
    )


def _to_global(held: Same | Own, kind: Kind, device: VirtualDevice) -> Any:
    if kind is not Kind.PER_REPLICA:
        return device.get_one(held)
    rows = device.rows(held)
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _combine(
    combination: Combination,
    before: Sequence[Same | Own],
    after: Sequence[Same | Own],
    takes_part: tuple[bool, ...] | None,
    device: VirtualDevice,
) -> list[Same | Own]:
    """Combine variables of all replicas, with sums in the order of the tree."""
    axes = device.layout.replica_axes
    count = len(before)

    def combine_local(*values: Any) -> list[Any]:
        return combine(combination, values[:count], values[count:], axes, takes_part)

    shapes = [device.rows(x)[0] for x in (*before, *after)]
    sizes = [(a, device.layout.traced_mesh.shape[a]) for a in axes]
    # `combine` is written with collectives. Trace it for one replica, then run it like the step.
    program = jax.make_jaxpr(combine_local, axis_env=sizes)(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes)
    )
    return run_virtually(program, [*before, *after], device)
