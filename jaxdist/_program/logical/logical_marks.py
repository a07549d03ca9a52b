"""Analysis of which values of a trace are marked with a layout over the logical devices."""

from typing import Any, TypeAlias

from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import get_input_variables
from jaxdist._program.logical.logical_layout import LOGICAL_LAYOUT

# The number of parts of each dim; None for a value that is not marked.
Parts: TypeAlias = tuple[int, ...] | None


def marks_of_results(program: Any) -> list[Parts]:
    """Return the marks of the results of an open or closed program.

    A value keeps its mark when a function or a loop returns it.
    """
    return MarkAnalysis().run(program, [None] * len(get_input_variables(program)))


class MarkAnalysis(Interpreter[Parts]):
    """The analysis of the layouts over logical devices with which values are marked."""

    def literal(self, literal: Any) -> Parts:
        return None

    def constant(self, variable: Any, value: Any) -> Parts:
        return None

    def operation(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        if eqn.primitive is LOGICAL_LAYOUT:
            return [tuple(max(n, 1) for n in eqn.params["parts"])]
        return [None] * len(eqn.outvars)

    def call(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        inside = eqn.primitive.name == "shard_map"
        return self.operation(eqn, inputs) if inside else super().call(eqn, inputs)

    def scan(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        loop = Scan.of(eqn.params)
        inside = marks_of_results(loop.program)
        # A scan without iterations returns its initial carry, not the marked one.
        state = [m if loop.length else None for m in inside[: loop.num_carry]]
        return [*state, *(None if m is None else (1, *m) for m in inside[loop.num_carry :])]

    # A mark inside one of these does not determine the layout of the result.
    cond = operation
    while_loop = operation
    linear_solve = operation
