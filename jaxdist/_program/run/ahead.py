"""Predicts the signatures of later, uneven batches; see Note [Batches to come]."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.arguments import Static, is_traced
from jaxdist._program.run.call import Call
from jaxdist._program.trace.trace import Signature
from jaxdist._program.uneven.uneven import not_virtually
from jaxdist._values import (
    Ahead,
    Kind,
    PerReplica,
    Placement,
    UnevenStep,
    mark_with_shapes,
    place_per_replica,
    steps_ahead,
)


@dataclasses.dataclass(frozen=True)
class LaterSteps:
    """The uneven steps that the data of a call will still produce, and the arguments they change.

    Equal ones lead to the same traces, except for dtypes and layouts of other arguments.
    """

    ahead: Ahead
    # For each per-replica input: its number, and its local shape without dim 0.
    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    arguments: tuple[Any, ...]  # their structure, and the static ones

    def signatures(self, call: Call, layout: ReplicaMesh) -> Iterator[tuple[UnevenStep, Signature]]:
        """Yield the signatures that `call.read` would make of calls with these batches."""
        placement = Placement(Kind.PER_REPLICA, layout.per_replica)
        for step in self.ahead:
            inputs = list(call.signature.inputs)
            uneven = [(i, tuple((n, *rest) for n in step.rows)) for i, rest in self.shapes]
            for i, rest in self.shapes:
                # As `call.read` does, pad to the replica with the most rows.
                shape = (max(step.rows) * layout.num_replicas, *rest)
                inputs[i] = dataclasses.replace(inputs[i], placement=placement, shape=shape)
            signature = dataclasses.replace(
                call.signature, inputs=tuple(inputs), uneven=tuple(uneven), step=str(step)
            )
            if signature != call.signature:
                yield step, signature


def find_later_steps(call: Call, layout: ReplicaMesh) -> LaterSteps | None:
    """Return the later batches of a call's data, or None if they cannot be known.

    They are unknown if some per-replica value does not come from a dataset, or if a static argument
    is a number. Both may depend on the rows of the batch.
    """
    flat, signature = call.flat, call.signature
    first = len(signature.inputs) - len(flat.dynamic)
    found: set[Ahead] = set()
    shapes: list[tuple[int, tuple[int, ...]]] = []
    for number, leaf in enumerate(flat.dynamic, first):
        slot = signature.inputs[number]
        if slot.kind is not Kind.PER_REPLICA or slot.is_scalar:
            continue
        ahead = steps_ahead(leaf) if isinstance(leaf, PerReplica) else ()
        # A concrete array in an enclosing trace is a constant: it stays the same for later batches.
        if call.is_traced and not is_traced(leaf):
            ahead = ()
        found.add(ahead)
        shapes.append((number, slot.shape[1:]))
    # Batches of different passes over data do not advance together.
    static = [s.value for s in flat.slots if isinstance(s, Static)]
    has_number = any(isinstance(x, (int, float)) and not isinstance(x, bool) for x in static)
    if len(found) != 1 or has_number:
        return None
    (ahead,) = found
    if not all(len(step.rows) == layout.num_replicas for step in ahead):
        return None
    arguments = (flat.treedef, signature.structure, flat.slots)
    return LaterSteps(ahead, tuple(shapes), arguments) if ahead else None


def check_can_be_uneven(signature: Signature, names: list[str], layout: ReplicaMesh) -> None:
    """Raise if per-replica values have different shapes where replicas need equal ones.

    Raises:
        ShapeError: The replicas are virtual, or each spans several devices.
    """
    for number, shapes in signature.uneven:
        if layout.num_virtual is not None:
            raise not_virtually(shapes)
        if layout.num_logical > 1:
            name = names[number - len(signature.inputs)]
            dtype = signature.inputs[number].dtype
            dtype = dtype if isinstance(dtype, np.dtype) else np.uint32
            # Zeros of these shapes raise the same error as the batch will.
            zeros = PerReplica([np.zeros(shape, dtype) for shape in shapes])
            mark_with_shapes(zeros, shapes)
            place_per_replica(name, zeros, layout)


def describe_later_step(step: UnevenStep) -> str:
    """Return the note for an error about a later batch."""
    rows = ", ".join(map(str, step.rows))
    return (
        f"This is about {step}, and nothing has run yet: its shapes are traced together with the "
        f"first step that gets a batch of this data. The rows of the replicas are [{rows}] there. "
        "If this step should never get that batch, leave it out: drop_remainder=True, or "
        "InputOptions(partial_batch=PartialBatch.DROP)."
    )
