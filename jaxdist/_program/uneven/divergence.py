"""Checks that all groups reach the same collective, and the errors if they do not.

See Note [Joined traces].
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import call_as, refuse
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.subprograms import iterate_with_inner
from jaxdist._program.proof.replication import get_named_axes
from jaxdist._program.uneven.joined_loops import LOOPS, list_constants
from jaxdist._program.uneven.joined_ops import Groups, Op, abstract, dtype_of, is_same
from jaxdist.errors import DivergentCollectiveError, ShapeError


def check_same_collective(
    ops: Sequence[Sequence[Op]], numbers: Sequence[int | None], groups: Groups
) -> list[Op]:
    """Return the next operation of each group that communicates.

    Args:
        ops: The operations of each group.
        numbers: The number of the operation in each group; None if the group has no more of them.
        groups: The group of each replica.

    Raises:
        DivergentCollectiveError: The operations have different names or operand ranks.
    """
    found = [None if i is None else own[i] for own, i in zip(ops, numbers, strict=True)]
    chosen = [op for op in found if op is not None]
    if len(chosen) == len(found) and len({*map(_get_kind, chosen)}) == 1:
        return chosen
    lines = groups.describe(
        [
            "nothing more"
            if op is None
            else f"{op.name} at {_compat.find_caller_of_library(op.eqn)}"
            for op in found
        ]
    )
    is_gradient = any(_compat.is_transposed(op.eqn) for op in chosen)
    raise DivergentCollectiveError(
        "Replicas whose local shapes differ do not reach the same collectives in "
        f"strategy.run:\n{lines}\n\n"
        "Every replica has to reach every collective, in the same order.\n\n"
        "Take the collective out of the branch that reads a local shape; a replica without "
        f"rows adds zeros to a sum.{_OF_GRADIENT if is_gradient else ''}"
    )


# A gather also has a collective in its gradient.
_OF_GRADIENT = (
    " Here the loss does not depend on a gathered value on some replicas, so its gradient has no "
    "collective there: compute the loss with the same operations for every local shape."
)


def _get_kind(op: Op) -> tuple[Any, ...]:
    # Loops may have different constants.
    inputs = () if op.name in LOOPS else op.inputs
    return op.name, *(jnp.ndim(abstract(x)) for x in inputs)


def check_same_shapes(ops: Sequence[Op], groups: Groups) -> None:
    """Raise `ShapeError` if the operations of the groups differ in more than their operands."""
    if not all(is_same(ops[0], op) for op in ops[1:]):
        raise _make_shape_error(ops, groups)


def check_same_gather(ops: Sequence[Op], shapes: Sequence[tuple[int, ...]], groups: Groups) -> None:
    """Raise `ShapeError` if the operands of a gather differ in a dim that is not gathered.

    Args:
        ops: The gather of each group.
        shapes: The shape of the operand in each group.
        groups: The group of each replica.
    """
    dim = ops[0].eqn.params["dim"]
    others = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    asked = {(op.eqn.params["dim"], op.eqn.params["sizes"]) for op in ops}
    if len(others) == len(asked) == 1:
        return
    raise call_as(
        f"An all_gather at {_compat.find_source(ops[0].eqn)}",
        refuse,
        f"different shapes on different replicas:\n{_describe_operands(ops, groups)}",
        f"Values that are concatenated on dim {dim} may differ in dim {dim} only.",
        "Gather on the dim that differs, or pad the others first.",
        kind=ShapeError,
    )


def check_same_loop(ops: Sequence[Op], groups: Groups) -> None:
    """Check that a loop or branch with a collective is the same one in all groups.

    Raises:
        ShapeError: Scans have different lengths.
        DivergentCollectiveError: The number of branches differs, or the values that are carried;
            or scans of different lengths gather a parameter.
    """
    where = _compat.find_source(ops[0].eqn)
    lengths = [op.eqn.params.get("length") for op in ops]
    if len(set(lengths)) > 1:
        gather = next(filter(_is_gather_of_pieces, iterate_with_inner(ops[0].eqn)), None)
        if gather is None:
            raise _make_shape_error(ops, groups)
        turns = groups.describe([f"{length} iterations" for length in lengths])
        raise DivergentCollectiveError(
            f"A {ops[0].name} at {where} uses a parameter in pieces, and has different "
            f"numbers of iterations on different replicas:\n{turns}\n\n"
            "A parameter in pieces is gathered from all replicas where it is used, at "
            f"{_compat.find_caller_of_library(gather)}, so all of them need as many iterations.\n\n"
            "Gather it before, model = jaxdist.partition.gather(model), inside of the function "
            "that is differentiated; or map over the rows with jax.vmap, which gathers once."
        )
    branches = [len(op.eqn.params.get("branches", ())) for op in ops]
    if len(set(branches)) > 1:
        counts = groups.describe([f"{count} branches" for count in branches])
        raise DivergentCollectiveError(
            f"A switch at {where} has different numbers of branches on "
            f"different replicas, and a collective in one of them:\n{counts}\n\n"
            "Every replica has to reach every collective, so a switch that holds one has the same "
            "branches on all replicas.\n\n"
            "Take the collective out of the switch, or give the switch the same branches for every "
            "local shape."
        )
    found = [_describe_loop(op) for op in ops]
    if len(set(found)) > 1:
        raise DivergentCollectiveError(
            f"A {ops[0].name} at {where} has a collective in it, and is "
            f"not the same loop on different replicas:\n{groups.describe(found)}\n\n"
            "Every replica has to reach every collective, so a loop that holds one carries the "
            "same values in the same direction on all replicas.\n\n"
            "Take the collective out of the loop, or write the loop in the same way for every "
            "local shape."
        )


def _is_gather_of_pieces(eqn: Any) -> bool:
    is_collective = bool(get_named_axes(eqn.params))
    return is_collective and _compat.is_from_folder(eqn, "_values/sharded/")


def _make_shape_error(ops: Sequence[Op], groups: Groups) -> ShapeError:
    return call_as(
        f"A {ops[0].name} at {_compat.find_source(ops[0].eqn)}",
        refuse,
        f"different shapes on different replicas:\n{_describe_operands(ops, groups)}",
        "Values that are combined element by element have one shape on all replicas.",
        "Reduce them over the dim that differs first (a sum and a count), or bring them together "
        "with get_replica_context().all_gather(value, axis).",
        kind=ShapeError,
    )


def _describe_loop(op: Op) -> str:
    """Describe what must be equal in the loops and branches of all groups."""
    others = len(op.inputs) - len(list_constants(op))
    if op.name == "cond":
        return f"{len(op.outputs)} results"
    if op.name == "while":
        return f"{others} values carried"
    carry = Scan.of(op.eqn.params).num_carry
    way = "backwards" if op.eqn.params["reverse"] else "forwards"
    return (
        f"{carry} values carried, {others - carry} read row by row, "
        f"{len(op.outputs) - carry} collected, {way}"
    )


def _describe_operands(ops: Sequence[Op], groups: Groups) -> str:
    return groups.describe(
        [", ".join(f"{dtype_of(a)}{list(jnp.shape(abstract(a)))}" for a in op.inputs) for op in ops]
    )
