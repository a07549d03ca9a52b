"""Finds the number of times that a loop runs."""

import re
from collections.abc import Collection

from jaxdist.hlo._text import Instruction, Module, elements

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
INDEX = re.compile(r"index=(\d+)")
# Operations that return their operand's number unchanged.
_PASSED_ON = frozenset({"copy", "bitcast", "copy-start", "copy-done", "convert"})


def count_trips(module: Module, within: dict[str, Instruction], loop: Instruction) -> int | None:
    """Return how often a `while` runs; None if that is not constant.

    XLA for CPU and GPU writes the number into the text. XLA for TPU does not, so this function
    reads the loop of a `scan` or a `fori_loop`: a number that starts at a constant, grows by a
    constant, and is compared with a constant.
    """
    noted = _KNOWN.search(loop.rest)
    if noted:
        return int(noted[1])
    called = dict(loop.called)
    condition = module.computations.get(called.get("condition", ""), {})
    body = module.computations.get(called.get("body", ""), {})
    compare = next((i for i in condition.values() if i.opcode == "compare"), None)
    if compare is None or len(compare.operands) != 2:
        return None
    # A `scan` or a `fori_loop` counts up to a limit. Other comparisons come from a `while_loop`.
    if "direction=LT" not in compare.rest and "direction=LE" not in compare.rest:
        return None
    place = _find_index(condition, compare.operands[0])
    start = _find_start(within, loop, place)
    step = _find_step(body, place)
    limit = _find_limit(condition, body, within, loop, compare.operands[1])
    # A step below 1 would never reach the limit.
    if start is None or limit is None or not step or step < 1:
        return None
    turns = limit - start + (1 if "direction=LE" in compare.rest else 0)
    return max(0, -(-turns // step))


def _find_limit(
    condition: dict[str, Instruction],
    body: dict[str, Instruction],
    within: dict[str, Instruction],
    loop: Instruction,
    name: str,
) -> int | None:
    """Return the constant limit: it is in the condition, or the body passes it on unchanged."""
    constant = _find_constant(condition, name)
    if constant is not None:
        return constant
    place = _find_index(condition, name)
    # XLA may move a constant out of the condition into the loop's tuple. It is constant only if the
    # body returns it unchanged.
    if _find_index(body, _get_element(find_root(body), place)) != place:
        return None
    return _find_start(within, loop, place)


def _find_start(within: dict[str, Instruction], loop: Instruction, place: int | None) -> int | None:
    """Return the constant with which an element of the loop's tuple starts."""
    given = within.get(loop.operands[0]) if loop.operands else None
    return _find_constant(within, _get_element(given, place))


def _find_step(body: dict[str, Instruction], place: int | None) -> int | None:
    """Return the constant that each run of the body adds to an element of the loop's tuple."""
    add = follow_copies(body, _get_element(find_root(body), place))
    if add is None or add.opcode != "add" or len(add.operands) != 2:
        return None
    # The compiler may have swapped the operands of the addition.
    one, other = add.operands
    if _find_index(body, one) == place:
        return _find_constant(body, other)
    return _find_constant(body, one) if _find_index(body, other) == place else None


def find_root(body: dict[str, Instruction]) -> Instruction | None:
    """Return the tuple that a body returns."""
    # The last tuple of a computation is its result.
    return next((i for i in reversed(body.values()) if i.opcode == "tuple"), None)


def _get_element(made: Instruction | None, place: int | None) -> str:
    """Return the name of an element of a tuple; "" if it is unknown."""
    if place is None or made is None or made.opcode != "tuple":
        return ""
    return next(iter(made.operands[place:]), "")


def follow_copies(
    within: dict[str, Instruction], name: str, copies: Collection[str] = _PASSED_ON
) -> Instruction | None:
    """Return the instruction with a name, following copies back to their source."""
    found = within.get(name)
    while found is not None and found.opcode in copies and found.operands:
        found = within.get(found.operands[0])
    return found


def _find_index(within: dict[str, Instruction], name: str) -> int | None:
    """Return the index of a name in the loop's tuple, or None."""
    found = follow_copies(within, name)
    if found is None or found.opcode != "get-tuple-element":
        return None
    of = within.get(found.operands[0])
    index = INDEX.search(found.rest)
    if of is None or of.opcode != "parameter" or index is None:
        return None
    return int(index[1]) if len(elements(of.shape)) > int(index[1]) else None


def _find_constant(within: dict[str, Instruction], name: str) -> int | None:
    """Return the integer that a name stands for, or None."""
    found = follow_copies(within, name)
    if found is None or found.opcode != "constant" or len(found.operands) != 1:
        return None
    text = found.operands[0]
    return int(text) if text.lstrip("-").isdigit() else None
