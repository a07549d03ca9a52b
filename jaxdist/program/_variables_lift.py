"""Making the variables that a step touches inputs and results of its program.

Which variables a step touches is known only after it was traced. So it is traced with those that
are known (none at first), and again if it used others, or in another way. A step without
variables is traced once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.errors import ContextError, StateDivergenceError
from jaxdist.mesh import ReplicaMesh
from jaxdist.program._in_slot import InSlot
from jaxdist.program._trace import Signature, Traced
from jaxdist.program._variables import Lifting, Use
from jaxdist.values import Kind, Placement, Variable, held_by, hold_all

# Each trace knows what the one before it found, so a step that is a function needs three.
MAX_TRACES = 8

Trace = Callable[[Callable[..., Any], Signature, Any], Traced]


@dataclasses.dataclass(frozen=True, eq=False)
class LiftedVariables:
    """The variables of one program. They stand after the variables of NNX objects."""

    written: tuple[Variable, ...]  # inputs before the arguments, and results
    read_only: tuple[Variable, ...]  # inputs after the arguments
    after: int  # inputs that stand before them
    uses: dict[int, Use]

    def __bool__(self) -> bool:
        return bool(self.uses)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the written ones and of the others; each name is there once."""
        made: dict[str, int] = {}

        def name(variable: Variable) -> str:
            number = made[variable.label] = made.get(variable.label, 0) + 1
            return f"variable {variable.label}" + (f" ({number})" if number > 1 else "")

        return [name(v) for v in self.written], [name(v) for v in self.read_only]

    def around(self, leaves: Sequence[Any]) -> list[Any]:
        """All inputs of the program, from those of the call."""
        return [
            *leaves[: self.after],
            *held_by(self.written),
            *leaves[self.after :],
            *held_by(self.read_only),
        ]

    def write(self, values: Sequence[Any]) -> None:
        """Give every written variable its new value; an interruption leaves none half done."""
        try:
            hold_all(self.written, values)
        except KeyboardInterrupt:
            hold_all(self.written, values)
            raise


NO_VARIABLES = LiftedVariables((), (), 0, {})


def lift(
    trace: Trace,
    fn: Callable[..., Any],
    signature: Signature,
    strategy: Any,
    known: LiftedVariables,
) -> tuple[Traced, Signature, LiftedVariables]:
    """Trace `fn` with the variables that it touches as inputs, and the written ones as results.

    Args:
        trace: How to trace.
        fn: The step.
        signature: Of its arguments.
        strategy: The strategy that runs it.
        known: Variables that it touched for other arguments.

    Raises:
        ContextError: Every trace touches other variables.
        MixedStrategyError: A variable of another strategy.
    """
    layout: ReplicaMesh = strategy.layout
    uses = known.uses
    for _ in range(MAX_TRACES):
        lifting = Lifting(layout, uses)
        extended = _extended(signature, lifting, layout)
        traced = trace(fn, extended, strategy)
        if lifting.is_settled:
            after = len(signature.graph.paths) if signature.graph else 0
            if not uses:
                found = NO_VARIABLES
            elif uses == known.uses and after == known.after:
                found = known
            else:
                found = LiftedVariables(lifting.written, lifting.read_only, after, uses)
            return traced, extended, found
        uses = lifting.seen
    names = sorted({u.variable.label for u in uses.values()})
    raise ContextError(
        f"strategy.run traced {getattr(fn, '__name__', fn)!s} {MAX_TRACES} times, and it used "
        f"other variables, or used them in another way, every time; last {names[:5]}.\n\n"
        "Which variables a step uses is part of its program.\n\n"
        "Choose them by an argument of the step, not by state that changes from call to call."
    )


def _extended(signature: Signature, lifting: Lifting, layout: ReplicaMesh) -> Signature:
    after = len(signature.graph.paths) if signature.graph else 0
    written = [_slot(v, layout) for v in lifting.written]
    read_only = [_slot(v, layout) for v in lifting.read_only]
    inputs = (
        *signature.inputs[:after],
        *written,
        *signature.inputs[after:],
        *read_only,
    )
    uneven = tuple((n if n < after else n + len(written), shapes) for n, shapes in signature.uneven)
    return dataclasses.replace(signature, inputs=inputs, uneven=uneven, lifting=lifting)


def _slot(variable: Variable, layout: ReplicaMesh) -> InSlot:
    placement = variable.home.placement or Placement(Kind.MIRRORED, layout.replicated)
    is_scalar = placement.kind is Kind.PER_REPLICA and not variable.shape
    return InSlot(placement, variable.home.global_shape, variable.dtype, False, is_scalar)


def check_equal(variables: Sequence[Variable], differs: Sequence[bool], num_replicas: int) -> None:
    """Refuse mirrored variables that would come out different on each replica."""
    names = [
        v.label for v, d in zip(variables, differs, strict=True) if d and not v.home.per_replica
    ]
    if not names:
        return
    raise StateDivergenceError(
        f"strategy.run would leave {len(names)} variable(s) with a different value on each of "
        f"{num_replicas} replicas: {', '.join(names[:10])}.\n\n"
        "Each of them is mirrored and has VariableAggregation.NONE (or belongs to no strategy), so "
        "all replicas must assign the same value, and that these are the same is not proved.\n\n"
        "All-reduce what is assigned (jaxdist.get_replica_context().all_reduce('mean', value)), "
        "make the variable with aggregation=VariableAggregation.MEAN, SUM or ONLY_FIRST_REPLICA, "
        "or give every replica its own: synchronization=VariableSynchronization.ON_READ. Where "
        "the values are the same for a reason that the trace does not show, say so with "
        "jaxdist.assume_replicated(value)."
    )
