"""The check of SPMD partitioning: a step must split or replicate each input before using it."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._program.jaxprs.control_flow import While
from jaxdist._program.jaxprs.interpreter import get_called_program, rule_for
from jaxdist._program.jaxprs.subprograms import open_jaxpr
from jaxdist._program.logical.logical_device import LOGICAL_LAYOUT
from jaxdist._program.trace.trace import Argument, Signature, TracedStep
from jaxdist.errors import ArgumentError

# For each value, the number of the input of the step; None for other values.
Numbers: TypeAlias = list[int | None]


def check_inputs(
    signature: Signature,
    traced: TracedStep,
    names: Sequence[str],
    layout: ReplicaMesh,
    read_only: int,
) -> None:
    """Check that the step splits or replicates each input that it uses.

    Exempt are scalars, arrays that are already split, and values that are not inputs in TensorFlow:
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
    numbers = [
        int(operand)
        if type(operand) is Argument
        and traced.num_graph <= operand < last
        and not _is_settled(signature.inputs[operand], layout)
        else None
        for operand in traced.operands
    ]
    found: dict[int, str] = {}
    for number, eqn in _find_uses(traced.jaxpr, numbers):
        found.setdefault(number, _compat.find_source(eqn))
    if found:
        raise ArgumentError(_explain(found, names, layout))


def _is_settled(slot: InSlot, layout: ReplicaMesh) -> bool:
    if not slot.local_shape(layout.num_replicas):
        return True
    axes = [a for e in tuple(slot.sharding.spec) for a in (e if isinstance(e, tuple) else (e,))]
    return any(a is not None and a not in layout.replica_axes for a in axes)


def _find_uses(program: Any, inputs: Numbers) -> Iterator[tuple[int, Any]]:
    """Return the uses of inputs by operations other than marks: (number of the input, equation).

    Args:
        program: The step, or a program inside it.
        inputs: For each input of `program`, which input of the step it is.
    """
    pairs = zip(open_jaxpr(program).invars, inputs, strict=True)
    wanted = {v: n for v, n in pairs if n is not None}
    if not wanted:
        return
    for eqn in open_jaxpr(program).eqns:
        numbers = [None if isinstance(v, Literal) else wanted.get(v) for v in eqn.invars]
        if eqn.primitive is LOGICAL_LAYOUT or all(n is None for n in numbers):
            continue
        # Passing an input to a function is not a use: the function may begin with the mark.
        inner = list(_find_calls(eqn, numbers))
        if not inner:
            yield from ((n, eqn) for n in numbers if n is not None)
        for inside, given in inner:
            yield from _find_uses(inside, given)


def _find_calls(eqn: Any, numbers: Numbers) -> Iterator[tuple[Any, Numbers]]:
    """Return the programs inside an operation, each with the inputs of the step that it gets."""
    rule = rule_for(eqn)
    if rule == "call":
        yield get_called_program(eqn), numbers
    elif rule == "scan":
        yield eqn.params["jaxpr"], numbers
    elif rule == "cond" and numbers[0] is None:
        for branch in eqn.params["branches"]:
            yield branch, numbers[1:]
    elif rule == "while_loop":
        loop = While.of(eqn.params)
        of_condition, of_body, state = loop.split(numbers)
        yield loop.condition, of_condition + state
        yield loop.body, of_body + state


@called("strategy.run")
def _explain(found: dict[int, str], names: Sequence[str], layout: ReplicaMesh) -> str:
    listed = [f"{names[n]}, used at {line}" for n, line in list(found.items())[:10]]
    more = f"\nand {len(found) - 10} more" if len(found) > 10 else ""
    return (
        f"{name_call()}: {len(found)} input(s) of the step are neither split over the "
        f"{layout.num_logical} logical devices nor replicated to them:\n"
        + "\n".join(listed)
        + more
        + "\n\nWith experimental_spmd_xla_partitioning=True a step splits or replicates every "
        "input before it uses the input (except scalars, variables and NNX objects).\n\n"
        "Begin the step with, for instance, batch = strategy."
        "experimental_replicate_to_logical_devices(batch), or experimental_split_to_logical_devices"
        "(batch, [...]), and use what that returns; or place the array in this way before."
    )
