"""Finds replicas without rows, and refuses to reduce a mean over no rows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.nnx import graph_rules
from jaxdist._program.proof.made_of_nothing import (
    UNKNOWN,
    Found,
    NothingAnalysis,
    Origin,
    constant,
    nothing,
)
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist._values import Kind
from jaxdist.errors import NoRowsError

REMEDIES = (
    "One of these: leave the last batch out (drop_remainder=True, or "
    "InputOptions(partial_batch=PartialBatch.DROP)); pad it, and weigh the rows by the mask that "
    "says which are real (PartialBatch.PAD); or, where it is the mean of a loss, use one that is a "
    "sum over the rows divided by the rows of all replicas, "
    "jaxdist.nn.compute_average_loss(losses, global_batch_size=n) with "
    "n = all_reduce('sum', x.shape[0]), and all_reduce('sum', grads)."
)


def has_empty_input(signature: Signature, num_replicas: int) -> bool:
    """Whether some per-replica input of this signature is empty on a replica."""
    return any(
        math.prod(i.local_shape(num_replicas)) == 0
        for i in signature.inputs
        if i.kind is Kind.PER_REPLICA and not i.is_scalar
    )


def check_without_rows(
    whole: Signature,
    own: Signature,
    traced: TracedStep,
    replicas: Sequence[int],
    layout: ReplicaMesh,
) -> None:
    """Raise if the empty batch of these replicas makes a nan that reaches a collective or state.

    Args:
        whole: The signature of the step.
        own: The same signature, as if all replicas had the shapes of these replicas.
        traced: The trace of these replicas.
        replicas: Their indices.
        layout: The strategy's layout.

    Raises:
        NoRowsError: It shows the line that made the nan, and what the nan reaches.
    """
    axes = frozenset(layout.replica_axes)
    rows = rows_of(whole, layout.num_replicas)

    def refuse(eqn: Any, line: str, origin: Origin) -> None:
        target = f"the {eqn.primitive.name} at {line}"
        raise NoRowsError(_message(origin, target, replicas, rows, whole.step))

    given = [
        _starting_value(o, v, own, layout.num_replicas)
        for o, v in zip(traced.operands, traced.jaxpr.invars, strict=True)
    ]
    found = NothingAnalysis(axes, refuse).run(traced.jaxpr, given)
    has = replicas_with_rows(whole, layout.num_replicas)
    takes_part = has is None or any(has[r] for r in replicas)
    # Batch statistics and metrics are combined over the replicas with rows only, so a nan from a
    # group without rows does not reach them.
    kinds = () if own.graph is None else own.graph.types
    combined = {
        number
        for number, kind in enumerate(kinds)
        if issubclass(kind, nnx.BatchStat) or graph_rules.is_metric(kind)
    }
    for number, result in enumerate(found[: traced.num_graph]):
        if result.nan is not None and (takes_part or number not in combined):
            target = _name(own, traced, number)
            raise NoRowsError(_message(result.nan, target, replicas, rows, whole.step))


def _starting_value(operand: Any, variable: Any, own: Signature, num_replicas: int) -> Found:
    if type(operand) is not Argument:
        return UNKNOWN if operand is None else constant(operand)
    slot = own.inputs[operand]
    if slot.kind is not Kind.PER_REPLICA or slot.is_scalar:
        return UNKNOWN
    # What is computed from an array without elements does not depend on data, so it is known.
    shape = slot.local_shape(num_replicas)
    return nothing(shape, variable.aval.dtype) if math.prod(shape) == 0 else UNKNOWN


def _name(signature: Signature, traced: TracedStep, number: int) -> str:
    graph = signature.graph
    count = len(graph.types) if graph else 0
    if graph is not None and number < count:
        return graph.name(number)
    written = traced.written[number - count :]
    return f"variable {written[0].label}" if written else "a variable"


def rows_of(signature: Signature, num_replicas: int) -> list[int]:
    """Return the number of rows on each replica.

    They are taken from the first input whose rows differ, or else from the first per-replica input.
    """
    for _, shapes in signature.uneven:
        return [s[0] if s else 0 for s in shapes]
    for slot in signature.inputs:
        if slot.kind is Kind.PER_REPLICA and not slot.is_scalar and not slot.is_variable:
            return [slot.local_shape(num_replicas)[0]] * num_replicas
    return []


@called("strategy.run")
def _message(
    origin: Origin, target: str, replicas: Sequence[int], rows: Sequence[int], step: str
) -> str:
    which = f"Replicas {list(replicas)} have" if len(replicas) > 1 else f"Replica {replicas[0]} has"
    return (
        f"{name_call()}: a mean over no rows would reach {target}, and with it all replicas.\n\n"
        f"{which} no rows in {step}, so {origin.name} at {origin.line} gives nan there. The "
        f"rows of the replicas are {list(rows)}.\n\n{_list_remedies(rows)}"
    )


def _list_remedies(rows: Sequence[int]) -> str:
    total, count = sum(rows), len(rows)
    if total < count:
        return REMEDIES
    size, longer = divmod(total, count)
    balanced = [size + (number < longer) for number in range(count)]
    return (
        "Where a dataset has divided this batch: InputOptions(balance_rows=True) divides it into "
        f"{', '.join(map(str, balanced))} rows, so that every replica has rows. Or "
        f"{REMEDIES[0].lower()}{REMEDIES[1:]}"
    )


def replicas_with_rows(signature: Signature, num_replicas: int) -> tuple[bool, ...] | None:
    """Return for each replica whether any per-replica argument has elements; None if all have.

    Variables with a copy on each replica do not count as rows.
    """
    uneven = dict(signature.uneven)
    given = [
        uneven.get(i) or (slot.local_shape(num_replicas),) * num_replicas
        for i, slot in enumerate(signature.inputs)
        if slot.kind is Kind.PER_REPLICA and not slot.is_scalar and not slot.is_variable
    ]
    if not given:
        return None
    has = tuple(any(math.prod(s) > 0 for s in shapes) for shapes in zip(*given, strict=True))
    return None if all(has) else has


def place_of(replica: int, layout: ReplicaMesh) -> dict[str, int]:
    """Return the index of a replica along each replica axis."""
    sizes = [layout.traced_mesh.shape[a] for a in layout.replica_axes]
    found = np.unravel_index(replica, sizes)
    return {a: int(i) for a, i in zip(layout.replica_axes, found, strict=True)}


def find_places_with_rows(signature: Signature, layout: ReplicaMesh) -> list[dict[str, int]]:
    """Return the position of one replica with rows for each group with the same trace."""
    # Replicas with the same shapes of uneven inputs share a trace. Reversed, so that the first
    # replica of a group is the one that stays in the dict.
    has = replicas_with_rows(signature, layout.num_replicas)
    columns = zip(*(shapes for _, shapes in signature.uneven), strict=True)
    groups = list(columns) or [()] * layout.num_replicas
    first = {group: r for r, group in reversed(list(enumerate(groups))) if has is None or has[r]}
    return [place_of(r, layout) for r in first.values()]
