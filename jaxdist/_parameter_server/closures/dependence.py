"""What each result of a closure depends on: its inputs, and updates of optimizers."""

import dataclasses
from typing import Any

from jaxdist._parameter_server.closures.marks import UPDATED
from jaxdist._program import ForwardAnalysis

# An input of the closure by its number, or an update: (optimizer, leaf).
Source = int | tuple[int, int]
Sources = frozenset[Source]

# Operations with one operand that keep its values, and change at most shape or layout. The results
# of `strategy.run` pass through some of them.
_PRESERVING = frozenset(
    {"broadcast_in_dim", "copy", "pcast", "pvary", "reshape", "sharding_constraint", "squeeze"}
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Args:
        sources: What it depends on.
        same_as: The input that it equals; None if it is computed.
    """

    sources: Sources = frozenset()
    same_as: int | None = None


_CONSTANT = Origin()


class SourceAnalysis(ForwardAnalysis[Origin]):
    """The origin of each value."""

    of_constants = _CONSTANT

    def operation(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
        if eqn.primitive.name in _PRESERVING and len(inputs) == 1:
            if eqn.outvars[0].aval.size == eqn.invars[0].aval.size:
                return inputs
        found: Sources = frozenset().union(*(origin.sources for origin in inputs))
        if eqn.primitive is UPDATED:
            found = found | {(eqn.params["optimizer"], eqn.params["leaf"])}
        return [Origin(found)] * len(eqn.outvars)

    def join(self, eqn: Any, aval: Any, first: Origin, second: Origin) -> Origin:
        same = first.same_as if first.same_as == second.same_as else None
        return Origin(first.sources | second.sources, same)

    # The number of iterations, and the choice of a branch, decide on the results too.
    def decide(self, eqn: Any, values: list[Origin], decided_by: Origin) -> list[Origin]:
        return [
            value if value.same_as is not None else Origin(value.sources | decided_by.sources)
            for value in values
        ]

    def linear_solve(self, eqn: Any, inputs: list[Origin]) -> list[Origin]:
        return self.operation(eqn, inputs)


def find_origins(closed: Any) -> list[Origin]:
    """Return the origin of each result of a closed program."""
    given = [Origin(frozenset({n}), n) for n in range(len(closed.jaxpr.invars))]
    return SourceAnalysis().run(closed, given)
