"""What each result of a closure depends on: its inputs, and updates of optimizers."""

from typing import Any

from jaxdist._parameter_server.closures.marks import UPDATED
from jaxdist._program import ForwardAnalysis

# An input of the closure by its number, or an update: (optimizer, leaf).
Source = int | tuple[int, int]
Sources = frozenset[Source]
_NOTHING: Sources = frozenset()


class SourceAnalysis(ForwardAnalysis[Sources]):
    """The inputs and updates that each value depends on."""

    of_constants = _NOTHING

    def operation(self, eqn: Any, inputs: list[Sources]) -> list[Sources]:
        found = _NOTHING.union(*inputs)
        if eqn.primitive is UPDATED:
            found = found | {(eqn.params["optimizer"], eqn.params["leaf"])}
        return [found] * len(eqn.outvars)

    def join(self, eqn: Any, aval: Any, first: Sources, second: Sources) -> Sources:
        return first | second

    # The number of iterations, and the choice of a branch, decide on the results too.
    def decide(self, eqn: Any, values: list[Sources], decided_by: Sources) -> list[Sources]:
        return [value | decided_by for value in values]

    def linear_solve(self, eqn: Any, inputs: list[Sources]) -> list[Sources]:
        return self.operation(eqn, inputs)


def find_sources(closed: Any) -> list[Sources]:
    """Return the sources of each result of a closed program."""
    given: list[Sources] = [frozenset({n}) for n in range(len(closed.jaxpr.invars))]
    return SourceAnalysis().run(closed, given)
