"""Variables of a step as inputs and results of its program; see Note [Lifted variables]."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.in_slot import InSlot
from jaxdist._program.jaxprs.primitives import PLACEHOLDER
from jaxdist._program.trace.trace import Argument, Signature, TracedStep, trace_on_pieces
from jaxdist._program.uneven.joined_ops import Groups
from jaxdist._program.uneven.uneven import choose_trace, joined_trace, traces_of_groups
from jaxdist._program.variables.step_variables import Lifting
from jaxdist._replica import HasLayout
from jaxdist._values import Kind, Placement, Variable, get_arrays, set_arrays
from jaxdist.errors import ContextError, DivergentCollectiveError, StateDivergenceError

MAX_TRACES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class LiftedVariables:
    """The variables of one program. Their inputs come after the variables of NNX objects."""

    written: tuple[Variable, ...]  # assigned: inputs before the arguments, and results
    read_only: tuple[Variable, ...]  # inputs after the arguments
    after: int  # the number of inputs before them
    refs: frozenset[int] = frozenset()  # by `id`: variables that a trace must hold as refs

    def __bool__(self) -> bool:
        return bool(self.written or self.read_only)

    @property
    def all(self) -> tuple[Variable, ...]:
        """The assigned variables, then the others."""
        return (*self.written, *self.read_only)

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Unique names of the assigned variables, and of the others."""
        made: dict[str, int] = {}

        def name(variable: Variable) -> str:
            number = made[variable.label] = made.get(variable.label, 0) + 1
            return f"variable {variable.label}" + (f" ({number})" if number > 1 else "")

        return [name(v) for v in self.written], [name(v) for v in self.read_only]

    def insert_into(self, leaves: Sequence[Any]) -> list[Any]:
        """Return all inputs of the program: the leaves of the call and the variables."""
        return [
            *leaves[: self.after],
            *get_arrays(self.written),
            *leaves[self.after :],
            *get_arrays(self.read_only),
        ]

    def write(self, values: Sequence[Any]) -> None:
        """Assign a new value to each written variable. An interrupt does not leave it half done."""
        try:
            set_arrays(self.written, values)
        except KeyboardInterrupt:
            # Ctrl-C may come between two assignments. Without this, some variables would have
            # values from before the step and others from after it.
            set_arrays(self.written, values)
            raise


NO_VARIABLES = LiftedVariables((), (), 0)


@called("strategy.run")
def lift(
    fn: Callable[..., Any], signature: Signature, strategy: HasLayout, known: LiftedVariables
) -> tuple[TracedStep, Signature, LiftedVariables]:
    """Trace `fn` with the variables that it uses as inputs, and the assigned ones as results.

    Args:
        fn: The step.
        signature: The signature of its arguments.
        strategy: The strategy that runs it.
        known: The variables that it used for other arguments.

    Raises:
        ContextError: Each trace of the step changes different variables in subprograms.
        MixedStrategyError: A variable belongs to another strategy.
    """
    layout = strategy.layout
    lifting = Lifting(layout, refs=known.refs)
    touched: dict[int, Variable] = {}
    for _ in range(MAX_TRACES):
        lifted = dataclasses.replace(signature, lifting=lifting)
        if signature.uneven:
            own, traces, groups = traces_of_groups(fn, lifted, strategy)
        else:
            trace_step = choose_trace(lifted, layout)
            own, traces, groups = [lifted], [trace_step(fn, lifted, strategy)], None
        # What any of the traces assigns, and what any of them uses.
        written = {id(v): v for t in traces for v in t.written}
        touched = {id(v): v for t in traces for v in t.touched}
        need_refs = lifting.refs.union(*(t.need_refs for t in traces))
        if need_refs == lifting.refs and all(
            len(t.touched) == len(touched) and len(t.written) == len(written) for t in traces
        ):
            break
        # Replicas with other shapes use other variables, or a variable must be a ref from the
        # start: trace again with all of them.
        lifting = Lifting(layout, tuple(touched.values()), frozenset(written), need_refs)
    else:
        names = sorted({v.label for v in touched.values()})
        raise ContextError(
            f"{name_call()} traced {getattr(fn, '__name__', fn)!s} {MAX_TRACES} times, and it used "
            f"other variables, or used them in another way, every time; last {names[:5]}.\n\n"
            "Which variables a step uses is part of its program.\n\n"
            "Choose them by an argument of the step, not by state that changes from call to call."
        )
    if groups is not None:
        _check_merge_calls(traces, groups)
    found = _make_lifted(signature, written, touched, lifting.refs, known)
    extended = _extend_signature(signature, found, layout)
    inner = [_extend_signature(s, found, layout) for s in own]
    # `trace_on_pieces` must come last: variables may be cut, so they must be inputs already.
    final = [
        trace_on_pieces(_add_inputs(t, s, found, layout), s, layout)
        for t, s in zip(traces, inner, strict=True)
    ]
    if groups is None:
        return final[0], extended, found
    return joined_trace(extended, inner, final, groups, layout), extended, found


@called("strategy.run")
def _check_merge_calls(traces: Sequence[TracedStep], groups: Groups) -> None:
    if len({len(t.merge_calls) for t in traces}) == 1:
        return
    calls = [f"{len(t.merge_calls)}, at {list(t.merge_calls)[:5]}" for t in traces]
    raise DivergentCollectiveError(
        f"{name_call()}: some replicas made a different number of merge_calls.\n"
        f"{groups.describe(calls)}\n\n"
        "A merge function runs for all replicas, so all of them must reach it.\n\n"
        "Call merge_call outside of the condition, and pass what the condition decides."
    )


def _make_lifted(
    signature: Signature,
    written: Mapping[int, Variable],
    touched: Mapping[int, Variable],
    refs: frozenset[int],
    known: LiftedVariables,
) -> LiftedVariables:
    """Return the variables of a program; `known` itself if they are the same.

    A call path is chosen by the identity of this object, so equal ones must be one object.
    """
    after = len(signature.graph.paths) if signature.graph else 0
    if not touched:
        return NO_VARIABLES
    read_only = {i: v for i, v in touched.items() if i not in written}
    same = (
        written.keys() == set(map(id, known.written))
        and read_only.keys() == set(map(id, known.read_only))
        and (after, refs) == (known.after, known.refs)
    )
    if same:
        return known
    return LiftedVariables(tuple(written.values()), tuple(read_only.values()), after, refs)


def _add_inputs(
    traced: TracedStep, signature: Signature, found: LiftedVariables, layout: ReplicaMesh
) -> TracedStep:
    """Return a trace whose placeholders are inputs, with results of variables in `found`'s order.

    `signature` already contains these inputs.
    """
    if not found:
        return traced
    body, marks = _compat.remove_placeholders(traced.jaxpr, PLACEHOLDER)
    by_id = {id(v): marks[n] for n, v in enumerate(traced.touched)}
    body = _compat.append_inputs(body, [by_id[id(v)] for v in found.all])
    body = body.replace(outvars=_sort_results(body.outvars, traced, found))
    count, written = len(signature.inputs) - len(found.all), len(found.written)
    # Inputs of the program: NNX variables, assigned variables, arguments, read-only variables.
    # The body got its new inputs at the end, so they are sorted here.
    places = [
        *range(found.after, found.after + written),
        *range(written + count, len(signature.inputs)),
    ]
    new = [
        (signature.inputs[p].abstract(), signature.inputs[p].placement.manual_spec(layout))
        for p in places
    ]
    order = [
        *range(found.after),
        *range(count, count + written),
        *range(found.after, count),
        *range(count + written, len(signature.inputs)),
    ]
    operands = tuple(
        Argument(o + written if o >= found.after else o) if type(o) is Argument else o
        for o in traced.operands
    )
    return dataclasses.replace(
        traced,
        closed=_compat.add_body_inputs(traced.closed, body, new, order),
        operands=(*operands, *map(Argument, places)),
        shapes=tuple(_sort_results(traced.shapes, traced, found)),
    )


def _sort_results(results: Sequence[Any], traced: TracedStep, found: LiftedVariables) -> list[Any]:
    """Return what belongs to the results of a trace, with variables in the order of `found`."""
    own = dict(zip(map(id, traced.written), results[found.after : traced.num_graph], strict=True))
    variables = [own[id(v)] for v in found.written]
    return [*results[: found.after], *variables, *results[traced.num_graph :]]


def _extend_signature(
    signature: Signature, found: LiftedVariables, layout: ReplicaMesh
) -> Signature:
    after = found.after
    written = [_slot_of_variable(v, layout) for v in found.written]
    read_only = [_slot_of_variable(v, layout) for v in found.read_only]
    inputs = (*signature.inputs[:after], *written, *signature.inputs[after:], *read_only)
    uneven = tuple((n if n < after else n + len(written), shapes) for n, shapes in signature.uneven)
    return dataclasses.replace(signature, inputs=inputs, uneven=uneven, lifting=None)


def _slot_of_variable(variable: Variable, layout: ReplicaMesh) -> InSlot:
    placement = variable.home.placement or Placement(Kind.MIRRORED, layout.replicated)
    is_scalar = placement.kind is Kind.PER_REPLICA and not variable.shape
    shape, dtype = variable.home.global_shape, variable.dtype
    return InSlot(placement, shape, dtype, False, is_scalar, is_variable=True)


@called("strategy.run")
def check_equal(variables: Sequence[Variable], differs: Sequence[bool], num_replicas: int) -> None:
    """Raise if a mirrored variable would differ between replicas."""
    found = [v for v, d in zip(variables, differs, strict=True) if d and not v.home.per_replica]
    if not found:
        return
    names = [v.label for v in found]
    own = next((v._remedy_of_divergence for v in found if v._remedy_of_divergence), "")
    if own:
        raise StateDivergenceError(
            f"{name_call()} would leave {len(names)} variable(s) with a different value on each of "
            f"{num_replicas} replicas: {', '.join(names[:10])}.\n\n{own}"
        )
    raise StateDivergenceError(
        f"{name_call()} would leave {len(names)} variable(s) with a different value on each of "
        f"{num_replicas} replicas: {', '.join(names[:10])}.\n\n"
        "Each of them is mirrored and has VariableAggregation.NONE (or belongs to no strategy), so "
        "all replicas must assign the same value, and jaxdist cannot prove that they do.\n\n"
        "All-reduce what is assigned (jaxdist.get_replica_context().all_reduce('mean', value)), "
        "make the variable with aggregation=VariableAggregation.MEAN, SUM or ONLY_FIRST_REPLICA, "
        "or give every replica its own: synchronization=VariableSynchronization.ON_READ. Where "
        "the values are the same for a reason that the trace does not show, say so with "
        "jaxdist.assume_replicated(value)."
    )
