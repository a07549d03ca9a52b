"""Makes the arguments of a program as shapes, for another layout with other replicas."""

import collections
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._program import InSlot, Program, unflatten
from jaxdist._values import Kind, PerReplica, Sharded
from jaxdist.errors import ArgumentError


def count_rows_per_replica(program: Program) -> int | None:
    """Return the rows of a batch for each replica; None if no input is per-replica.

    If inputs have different lengths, this is the most frequent length.
    """
    counts = collections.Counter(_get_row_counts(program).values())
    return counts.most_common(1)[0][0] if counts else None


def _get_row_counts(program: Program) -> dict[str, int]:
    """Return the rows for each replica of every per-replica input, by its name."""
    return {
        name: slot.shape[0] // program.layout.num_replicas
        for name, slot in zip(program.input_names, program.signature.inputs, strict=True)
        if slot.kind is Kind.PER_REPLICA and not slot.is_scalar
    }


def make_abstract_call(
    program: Program, layout: ReplicaMesh, rows: int | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments of the same structure for `layout`, with `rows` rows for each replica.

    Raises:
        ArgumentError: `rows` differs from the program's, and inputs have different lengths; the
            program uses variables from a closure, or has values of different shapes.
    """
    # See Note [A plan lowers the step again].
    _check_program(program)
    signature = program.signature
    own = count_rows_per_replica(program)
    if rows is not None and rows != own:
        _check_one_length(program, rows)
    # The first inputs are the variables of NNX objects. They become abstract modules again.
    graph_size = len(signature.graph.paths) if signature.graph else 0
    made = [_make_abstract(slot, program.layout, layout, rows) for slot in signature.inputs]
    nodes = signature.graph.merge(made[:graph_size]) if signature.graph else ()
    given = [
        _wrap(x, slot)
        for x, slot in zip(made[graph_size:], signature.inputs[graph_size:], strict=True)
    ]
    return unflatten(signature.treedef, signature.slots, given, nodes)


def _make_abstract(
    slot: InSlot, before: ReplicaMesh, layout: ReplicaMesh, rows: int | None
) -> jax.ShapeDtypeStruct:
    shape = slot.shape
    if slot.cut is not None:
        # The padding depends on the number of pieces, so compute the padded length again.
        pieces = slot.cut.pieces(layout)
        dim, length = slot.cut.dim, slot.cut.rows(pieces) * pieces
        shape = (*shape[:dim], length, *shape[dim + 1 :])
    elif slot.kind is Kind.PER_REPLICA:
        local = shape[0] // before.num_replicas
        length = local if rows is None or slot.is_scalar else rows
        shape = (length * layout.num_replicas, *shape[1:])
    return jax.ShapeDtypeStruct(
        shape, slot.dtype, weak_type=slot.weak_type, sharding=_get_sharding(slot, layout)
    )


def _get_sharding(slot: InSlot, layout: ReplicaMesh) -> NamedSharding | None:
    """Return the sharding of an input over logical devices, on the mesh of `layout`.

    None if the input is per-replica, or not sharded over logical devices.
    """
    if slot.kind is Kind.PER_REPLICA or not any(slot.sharding.spec):
        return None
    mesh = slot.sharding.mesh
    if mesh.axis_names == layout.mesh.axis_names:
        return NamedSharding(layout.mesh, PartitionSpec(*slot.sharding.spec))
    # An array that is split over several dims has a mesh in which the logical axis is factored,
    # with other axis names. Only the number of parts of each dim can be carried over.
    entries = [e if isinstance(e, tuple) else (e,) for e in tuple(slot.sharding.spec)]
    parts = [math.prod(mesh.shape[a] for a in axes if a is not None) for axes in entries]
    return layout.tiles(parts) if math.prod(parts) == layout.num_logical else None


def _wrap(array: jax.ShapeDtypeStruct, slot: InSlot) -> Any:
    if slot.cut is not None:
        return Sharded(array, *slot.cut)
    if slot.kind is Kind.PER_REPLICA:
        # Typed Any: `of_global` is declared for arrays, and also accepts shapes.
        shape: Any = array
        return PerReplica.of_global(shape, scalars=slot.is_scalar)
    return array


def _check_program(program: Program) -> None:
    name = program.name
    if program.variables:
        names = [n for group in program.variables.names for n in group]
        raise ArgumentError(
            f"compile_for was called on {name}, which uses {', '.join(names[:4])} from a closure."
            "\n\nVariables belong to the devices of one strategy, and a plan is for other devices."
            "\n\nPass their values as arguments of the step, or hold them in an NNX object."
        )
    if program.signature.uneven:
        raise ArgumentError(
            f"compile_for was called on {name}, whose replicas have values of different shapes.\n\n"
            "A plan is for replicas with values of one shape.\n\n"
            "Pass values of one shape to strategy.lower."
        )
    if program.layout.num_virtual is not None:
        raise ArgumentError(
            f"compile_for was called on {name} of a strategy with deterministic=True.\n\n"
            "In a plan each replica has devices of its own, so there are no virtual replicas.\n\n"
            "Call lower of a strategy without deterministic."
        )


@called("compile_for")
def _check_one_length(program: Program, rows: int) -> None:
    lengths = _get_row_counts(program)
    if len(set(lengths.values())) > 1:
        raise refuse(
            f"a global_batch of {rows} rows for each replica, and the per-replica inputs of "
            f"{program.name} have different numbers of rows: {lengths}.",
            "global_batch sets the number of rows of all per-replica inputs.",
            "Pass the batch of that size to strategy.lower, and leave global_batch out.",
        )
