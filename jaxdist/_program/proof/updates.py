"""Analysis of whether a step updates an argument, as an optimizer updates parameters."""

import enum
from collections.abc import Mapping
from typing import Any

from jaxdist._program.jaxprs.forward_analysis import ForwardAnalysis


class Part(enum.IntEnum):
    """How a value depends on one argument; `join` takes the larger of two."""

    CONSTANT = 0  # equal on all replicas, and independent of the argument
    DATA = 1  # may differ between replicas, and independent of the argument
    ITSELF = 2  # the argument, scaled by constants
    MOVED = 3  # the scaled argument, plus a term of the replica's data
    UPDATED = 4  # the scaled argument, plus a term that depends on the argument
    COMPUTED = 5  # depends on the argument in another way


# Operations with one operand that keep its values up to sign, shape, dtype and layout.
_LINEAR_OPERATIONS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "neg", "pcast", "pvary", "reshape"}
    | {"mesh_cast", "reshard", "sharding_constraint", "squeeze", "stop_gradient"}
)
_INDEPENDENT = frozenset({Part.CONSTANT, Part.DATA})
_LINEAR = frozenset({Part.ITSELF, Part.MOVED, Part.UPDATED})


def part_of_result(jaxpr: Any, variable: Any, own: Mapping[Any, bool], result: int) -> Part:
    """Return how result number `result` of an open jaxpr depends on its input `variable`.

    Args:
        jaxpr: The program of one replica.
        variable: One of its inputs.
        own: For inputs, whether each replica has its own value.
        result: The number of the result.
    """
    given = [
        Part.ITSELF if v is variable else Part.DATA if own.get(v, False) else Part.CONSTANT
        for v in jaxpr.invars
    ]
    return UpdateAnalysis().run(jaxpr, given)[result]


class UpdateAnalysis(ForwardAnalysis[Part]):
    """The analysis of how values depend on one argument."""

    of_constants = Part.CONSTANT

    def join(self, eqn: Any, aval: Any, first: Part, second: Part) -> Part:
        return max(first, second)

    def operation(self, eqn: Any, inputs: list[Part]) -> list[Part]:
        return [_classify(eqn.primitive.name, inputs)] * len(eqn.outvars)

    # Optimizers have no such operations, so no precise rule is needed.
    while_loop = operation
    linear_solve = operation


def _classify(name: str, given: list[Part]) -> Part:
    found = set(given)
    # `axis_index` has no operands, and still differs between replicas.
    if found <= _INDEPENDENT:
        return Part.DATA if Part.DATA in found or name == "axis_index" else Part.CONSTANT
    linear = [g for g in given if g in _LINEAR]
    others = [g for g in given if g not in _LINEAR]
    if name in _LINEAR_OPERATIONS:
        return given[0]
    if name in ("add", "add_any", "sub") and linear:
        return max(linear + [_classify_sum(g) for g in others])
    if name == "mul" and len(linear) == 1 and others == [Part.CONSTANT]:
        return linear[0]
    if name == "div" and given[1] is Part.CONSTANT:
        return given[0]
    if name == "select_n" and given[0] in _INDEPENDENT and linear:
        return max(given[1:]) if Part.COMPUTED not in given else Part.COMPUTED
    return Part.COMPUTED


def _classify_sum(part: Part) -> Part:
    """Return the kind of a sum of a linear value and a value of this kind."""
    steps = {Part.CONSTANT: Part.ITSELF, Part.DATA: Part.MOVED}
    return steps.get(part, Part.UPDATED)
