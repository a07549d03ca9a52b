"""Chooses the shardings of a program's results."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.in_slot import InSlot, OutSlot
from jaxdist._program.state.carried import find_carried_arguments
from jaxdist._program.trace.trace import Signature, TracedStep
from jaxdist._values import Kind


def choose_result_shardings(
    layout: ReplicaMesh, signature: Signature, traced: TracedStep, outputs: Sequence[OutSlot]
) -> list[NamedSharding] | list[NamedSharding | None]:
    """Return the shardings of the results.

    State keeps the sharding of its input. Otherwise the next step would have to compile again.
    """
    if layout.num_logical == 1:
        return [NamedSharding(layout.mesh, o.spec(layout)) for o in outputs]
    # Only with logical devices can one kind of result have several shardings.
    pins = _choose_over_logical_devices(layout, signature, traced, outputs)
    inputs = (i.sharding for i in signature.inputs)
    if all(s is None or s.mesh == layout.mesh for s in (*pins, *inputs)):
        return pins
    # None lets XLA choose. JAX cannot express XLA's choice if the mesh splits an axis into factors.
    return [
        NamedSharding(layout.mesh, o.spec(layout)) if pin is None else pin
        for o, pin in zip(outputs, pins, strict=True)
    ]


def _choose_over_logical_devices(
    layout: ReplicaMesh, signature: Signature, traced: TracedStep, outputs: Sequence[OutSlot]
) -> list[NamedSharding | None]:
    inputs = signature.inputs
    came_in: dict[Any, set[NamedSharding]] = {}
    for slot in inputs:
        key = (slot.kind, slot.local_shape(layout.num_replicas), slot.dtype)
        came_in.setdefault(key, set()).add(_whole_row_sharding(layout, slot))
    source = find_carried_arguments(signature, traced, layout.num_replicas)
    pins: list[NamedSharding | None] = []
    for i, out in enumerate(outputs):
        # In this order: the step's constraint, the sharding of the old value, the only candidate.
        known = came_in.get((out.kind, out.shape, out.dtype), set())
        marked = out.marked_sharding(layout)
        if marked is not None:
            pins.append(marked)
        elif i < traced.num_graph:
            pins.append(inputs[i].sharding)
        elif i in source and inputs[source[i]].kind is out.kind:
            pins.append(_whole_row_sharding(layout, inputs[source[i]]))
        elif len(known) == 1:
            pins.append(next(iter(known)))
        elif 0 in out.shape:
            # XLA gives all arrays without elements the same sharding.
            pins.append(NamedSharding(layout.mesh, out.spec(layout)))
        else:
            pins.append(None)
    return pins


def _whole_row_sharding(layout: ReplicaMesh, slot: InSlot) -> NamedSharding:
    """Return the sharding of an input, with each replica's rows on all its logical devices."""
    if slot.kind is not Kind.PER_REPLICA:
        return slot.sharding
    rest = tuple(slot.sharding.spec)[1:]
    return NamedSharding(slot.sharding.mesh, PartitionSpec(layout.replica_spec[0], *rest))
