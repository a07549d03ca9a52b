"""The check of SPMD partitioning: a step must split or replicate each input before using it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import While
from jaxdist._program.jaxprs.subprograms import open_jaxpr
from jaxdist._program.logical.logical_layout import LOGICAL_LAYOUT
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist.errors import ArgumentError


def check_inputs(
    signature: Signature,
    traced: TracedStep,
    names: Sequence[str],
    layout: ReplicaMesh,
    read_only: int,
) -> None:
    """Check that the step splits or replicates each input that it uses.

    Exempt are scalars, arrays that are already split, and values that are no inputs in TensorFlow:
    variables, the state of NNX objects, and arrays that the step closes over.

    Args:
        signature: The signature of the step.
        traced: The step.
        names: The names of all inputs.
        layout: The layout of the strategy.
        read_only: The number of variables at the end of the inputs.

    Raises:
        ArgumentError: An input is neither split nor replicated. The error names all such inputs,
            with the line of the first use of each.
    """
    last = len(signature.inputs) - read_only
    wanted: dict[Any, int] = {}
    for operand, var in zip(traced.operands, traced.jaxpr.invars, strict=True):
        if type(operand) is not Argument or not traced.num_graph <= operand < last:
            continue
        if not _is_settled(signature.inputs[operand], layout):
            wanted[var] = int(operand)
    found: dict[int, str] = {}
    for number, eqn in _find_uses(traced.jaxpr, wanted):
        found.setdefault(number, _compat.find_source(eqn))
    if found:
        raise ArgumentError(_explain(found, names, layout))


def _is_settled(slot: InSlot, layout: ReplicaMesh) -> bool:
    if not slot.local_shape(layout.num_replicas):
        return True
    axes = [a for e in tuple(slot.sharding.spec) for a in (e if isinstance(e, tuple) else (e,))]
    return any(a is not None and a not in layout.replica_axes for a in axes)


def _find_uses(program: Any, wanted: dict[Any, int]) -> Iterator[tuple[int, Any]]:
    """Return the uses of inputs by operations other than marks: (number of the input, equation)."""
    if not wanted:
        return
    for eqn in open_jaxpr(program).eqns:
        numbers = [None if isinstance(v, Literal) else wanted.get(v) for v in eqn.invars]
        if eqn.primitive is LOGICAL_LAYOUT or all(n is None for n in numbers):
            continue
        # Passing an input to a function is no use: the function may begin with the mark.
        inner = list(_find_calls(eqn, numbers))
        if not inner:
            yield from ((n, eqn) for n in numbers if n is not None)
        for call in inner:
            yield from _find_uses(call.program, call.select_wanted())


@dataclasses.dataclass(frozen=True)
class _Call:
    """A program inside an operation, and which inputs of the step it gets."""

    program: Any
    numbers: list[int | None]

    def select_wanted(self) -> dict[Any, int]:
        invars = open_jaxpr(self.program).invars
        pairs = zip(invars, self.numbers, strict=True)
        return {v: n for v, n in pairs if n is not None}


def _find_calls(eqn: Any, numbers: list[int | None]) -> Iterator[_Call]:
    name, params = eqn.primitive.name, eqn.params
    if name in known.CALLS and known.CALLS[name] in params:
        yield _Call(params[known.CALLS[name]], numbers)
    elif name == "scan":
        yield _Call(params["jaxpr"], numbers)
    elif name == "cond" and numbers[0] is None:
        for branch in params["branches"]:
            yield _Call(branch, numbers[1:])
    elif name == "while":
        loop = While.of(params)
        of_condition, of_body, state = loop.split(numbers)
        yield _Call(loop.condition, of_condition + state)
        yield _Call(loop.body, of_body + state)


def _explain(found: dict[int, str], names: Sequence[str], layout: ReplicaMesh) -> str:
    listed = [f"{names[n]}, used at {line}" for n, line in list(found.items())[:10]]
    more = f"\nand {len(found) - 10} more" if len(found) > 10 else ""
    return (
        f"strategy.run: {len(found)} input(s) of the step are neither split over the "
        f"{layout.num_logical} logical devices nor replicated to them:\n"
        + "\n".join(listed)
        + more
        + "\n\nWith experimental_spmd_xla_partitioning=True a step says so of every input before "
        "it uses it (not of scalars, variables and NNX objects).\n\n"
        "Begin the step with, for instance, batch = strategy."
        "experimental_replicate_to_logical_devices(batch), or experimental_split_to_logical_devices"
        "(batch, [...]), and use what that returns; or place the array so before."
    )
