"""Finds all-gathers that a loop repeats for the same array."""

import dataclasses

from jaxdist.hlo import _text
from jaxdist.hlo._text import Instruction, Module
from jaxdist.hlo._trips import INDEX, count_trips, find_root, follow_copies

_COPIES = frozenset({"copy", "bitcast", "opt-barrier"})
# The results of these differ from run to run, even with equal operands.
_CHANGING = frozenset(
    "rng rng-bit-generator rng-get-and-update-state infeed recv while custom-call".split()
)


@dataclasses.dataclass(frozen=True)
class RepeatedGather:
    """An all-gather in a loop whose operand the loop does not change.

    `num_bytes` is the size of its result on one device, and `times` how often the loop runs; None
    if that is not constant. `source` is the user's line, or "".
    """

    num_bytes: int
    times: int | None
    source: str


def repeated_gathers(text: str) -> tuple[RepeatedGather, ...]:
    """Return the all-gathers that could run once, before their loop.

    Args:
        text: The result of `jax.stages.Compiled.as_text`.

    Returns:
        One entry for each operation, in program order.

    Example:
        >>> repeated_gathers("%r = f32[4]{0} all-gather(%x), dimensions={0}")
        ()
    """
    module = _text.read(text)
    found: list[RepeatedGather] = []
    for computation in module.computations.values():
        for loop in (i for i in computation.values() if i.opcode == "while"):
            times = count_trips(module, computation, loop)
            # A loop that runs once gathers once.
            if times != 1:
                body = module.computations.get(dict(loop.called).get("body", ""), {})
                found += _find_in_body(module, body, times)
    return tuple(found)


def _find_in_body(
    module: Module, body: dict[str, Instruction], times: int | None
) -> list[RepeatedGather]:
    found = []
    constant = _find_invariants(body)
    for written in body.values():
        gather = _text.resolve_start(written)
        if gather.opcode == "all-gather" and constant.issuperset(gather.operands):
            source = _text.source(module, _text.metadata(gather))
            found.append(RepeatedGather(_text.num_bytes(gather.shape), times, source))
    return found


def _find_invariants(body: dict[str, Instruction]) -> set[str]:
    """Return the values of a loop's body that are the same in every iteration."""
    parameters = {i.name for i in body.values() if i.opcode == "parameter"}
    # The body takes and returns one tuple. An element that it returns unchanged is invariant.
    root = find_root(body)
    returned = [follow_copies(body, name, _COPIES) for name in root.operands] if root else []
    kept = {n for n, made in enumerate(returned) if made and _get_index(made, parameters) == n}
    constant: set[str] = set()
    for instruction in body.values():
        if instruction.opcode == "parameter" or instruction.opcode in _CHANGING:
            continue
        number = _get_index(instruction, parameters)
        operands = instruction.operands if number is None else ()
        if (number is None or number in kept) and all(name in constant for name in operands):
            constant.add(instruction.name)
    return constant


def _get_index(instruction: Instruction, parameters: set[str]) -> int | None:
    """Return which element of the loop's tuple an instruction reads; None for others."""
    if instruction.opcode != "get-tuple-element" or instruction.operands[0] not in parameters:
        return None
    found = INDEX.search(instruction.rest)
    return int(found[1]) if found else None
