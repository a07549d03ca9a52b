"""Proof of which values of a traced program are equal on all replicas.

The fact about a value is the set of replica axes over which it may differ. Replicated inputs have
the empty set. A reduction over an axis removes the axis, and `axis_index` and permutations add it.
An operation that is not on the allow-list (`FIRST_ORDER` in jaxprs/primitives.py) adds all axes.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._collectives import ASSUME_REPLICATED, NO_PLAN, REQUIRE_REPLICATED, AllReducePlan
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.control_flow import Scan, While
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis
from jaxdist._program.jaxprs.subprograms import open_jaxpr, subprograms
from jaxdist._values import OPEN, PIECE, Cut
from jaxdist.errors import DivergentCollectiveError, StateDivergenceError

Differs: TypeAlias = frozenset[str]
NONE: Differs = frozenset()


@dataclasses.dataclass(frozen=True)
class TracedCollective:
    """A collective of a traced step.

    `bytes_per_device` is the size of its operands as the step sees them, on a device that is a
    replica. Several logical devices may divide it, as the compiler decides.
    """

    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    operands: int
    grouped: bool
    source: str
    times: int | None  # how often it runs in a step; None where a loop decides while running
    plan: AllReducePlan = NO_PLAN  # of the all-reduce that it is a part of
    # Whether it scatters a gradient for `sharded_update`, and whether that gradient is equal on
    # all replicas.
    is_of_update: bool = False
    scatters_equal: bool = False

    @property
    def algorithm(self) -> str:
        """The algorithm of the all-reduce; empty for other collectives."""
        return self.plan.algorithm

    def __repr__(self) -> str:
        times = "" if self.times == 1 else f" x {self.times or '(a while loop)'}"
        groups = " in groups" if self.grouped else ""
        return (
            f"{self.kind} over {', '.join(self.axes)}{groups}: {self.operands} operand(s), "
            f"{self.bytes_per_device:,} bytes of a replica{times}, requested at {self.source}"
            + (f", by {self.algorithm}" if self.algorithm else "")
        )


@dataclasses.dataclass(frozen=True)
class Replication:
    """The result of the analysis: the facts of the outputs, and the collectives."""

    outputs: tuple[Differs, ...]
    collectives: tuple[TracedCollective, ...]


def analyse(jaxpr: Any, inputs: Sequence[Differs], axes: Differs) -> Replication:
    """Analyse an open or closed jaxpr of one replica.

    Args:
        jaxpr: The traced step.
        inputs: For each input, the axes over which it may differ.
        axes: The replica axes of size two and more.

    Raises:
        DivergentCollectiveError: Some replicas may not reach a collective.
    """
    analysis = ReplicationAnalysis(axes)
    outputs = analysis.run(jaxpr, inputs)
    return Replication(tuple(outputs), tuple(analysis.collectives.values()))


def analyse_equation(eqn: Any, inputs: Sequence[Differs], axes: Differs) -> list[Differs]:
    """Return for each result of one equation the axes over which it may differ."""
    return ReplicationAnalysis(axes).equation(eqn, list(inputs))


class ReplicationAnalysis(ForwardAnalysis[Differs]):
    """The replication analysis; a fact is the set of axes over which a value may differ."""

    of_constants = NONE

    def __init__(self, axes: Differs) -> None:
        self.axes = axes
        # The key is the path of nested equations: a fixpoint analyses its body several times, and
        # one jitted function may be called from several places.
        self.collectives: dict[tuple[int, ...], TracedCollective] = {}
        self.path: tuple[int, ...] = ()
        # The axes over which control flow may differ at the current equation, and how often the
        # equation runs in one step.
        self.divergent: Differs = NONE
        self.times: int | None = 1
        # The plan of the current all-reduce, and the line that called it.
        self.plan = NO_PLAN
        self.source = ""

    def join(self, eqn: Any, aval: Any, first: Differs, second: Differs) -> Differs:
        return first | second

    def equation(self, eqn: Any, inputs: list[Differs]) -> list[Differs]:
        around, self.path = self.path, (*self.path, id(eqn))
        results = super().equation(eqn, inputs)
        self.path = around
        # A replica that does not reach this equation has another value, whatever the operands are.
        return [r | self.divergent for r in results]

    def operation(self, eqn: Any, inputs: list[Differs]) -> list[Differs]:
        name = eqn.primitive.name
        joined = NONE.union(*inputs)
        if name in known.REPLICATING or name in known.VARYING:
            return self._collective(eqn, name, joined)
        if eqn.primitive is ASSUME_REPLICATED:
            return [NONE]
        if eqn.primitive is PIECE:
            return [joined - self._get_axes_of_cut(eqn.params["cut"])]
        if eqn.primitive is OPEN:
            return [joined | self._get_axes_of_cut(eqn.params["cut"])]
        if eqn.primitive is REQUIRE_REPLICATED:
            if joined:
                raise StateDivergenceError(_explain_must_be_equal(eqn))
            return inputs
        if name in known.PAIRWISE:
            return inputs
        if name in known.FIRST_ORDER and not eqn.effects:
            return [joined] * len(eqn.outvars)
        # An unknown primitive may run its programs any number of times, on any values. Analyse
        # them anyway, so that their collectives are found.
        with self._enter(self.divergent, None):
            for inner in subprograms(eqn):
                self.run(inner, [self.axes] * len(open_jaxpr(inner).invars))
        return [self.axes] * len(eqn.outvars)

    def _get_axes_of_cut(self, cut: Cut) -> Differs:
        return self.axes if cut.axes is None else self.axes & frozenset(cut.axes)

    @contextlib.contextmanager
    def _enter(self, divergent: Differs, times: int | None) -> Iterator[None]:
        """Set `divergent` and `times` for the equations of an inner program, and restore them."""
        around = self.divergent, self.times
        self.divergent, self.times = divergent, times
        yield
        self.divergent, self.times = around

    def call(self, eqn: Any, inputs: list[Differs]) -> list[Differs]:
        around = self.plan, self.source
        # The collectives of an all-reduce are reported at the user's line, not at jaxdist's.
        if "plan" in eqn.params:
            self.plan, self.source = eqn.params["plan"], _compat.find_source(eqn)
        results = super().call(eqn, inputs)
        self.plan, self.source = around
        return results

    def _collective(self, eqn: Any, name: str, joined: Differs) -> list[Differs]:
        named = get_named_axes(eqn.params)
        over = frozenset(named) & self.axes
        grouped = eqn.params.get("axis_index_groups") is not None
        if name in known.COLLECTIVES and named:
            # The replicas that skip the collective would make the others wait forever.
            if over & self.divergent:
                if _compat.is_from_folder(eqn, "_values/sharded/"):
                    raise DivergentCollectiveError(_explain_gather(eqn))
                where = self.source or _compat.find_source(eqn)
                raise DivergentCollectiveError(_explain_may_not_reach(where, name))
            if over:
                found = self._record(eqn, name, named)
                if name in known.SCATTERS and _compat.is_from_folder(eqn, "_update/"):
                    equal = not joined & over
                    found = dataclasses.replace(found, is_of_update=True, scatters_equal=equal)
                self.collectives[self.path] = found
        # A grouped reduction gives each group its own result.
        if name in known.REPLICATING and not grouped:
            result = joined - over
        else:
            result = joined | over
        return [result] * len(eqn.outvars)

    def _record(self, eqn: Any, name: str, named: tuple[str, ...]) -> TracedCollective:
        avals = [v.aval for v in eqn.invars]
        return TracedCollective(
            name,
            named,
            sum(int(a.size) * a.dtype.itemsize for a in avals),
            len(avals),
            eqn.params.get("axis_index_groups") is not None,
            self.source or _compat.find_source(eqn),
            self.times,
            self.plan,
        )

    def scan(self, eqn: Any, inputs: list[Differs]) -> list[Differs]:
        times = None if self.times is None else self.times * Scan.of(eqn.params).length
        with self._enter(self.divergent, times):
            return super().scan(eqn, inputs)

    def while_loop(self, eqn: Any, inputs: list[Differs]) -> list[Differs]:
        # Not the rule of `ForwardAnalysis`: the fact of the condition also changes `divergent` for
        # the condition itself, so both need one common fixpoint.
        loop = While.of(eqn.params)
        of_condition, of_body, state = loop.split(inputs)
        inside = self.divergent
        while True:
            before = inside
            # Replicas that have left the loop do not compute the condition any more, so the
            # condition counts as a part of the loop.
            with self._enter(inside, None):
                [goes_on] = self.run(loop.condition, [*of_condition, *state])
            inside = inside | goes_on
            with self._enter(inside, None):
                out = self.run(loop.body, [*of_body, *state])
            grown = [a | b | inside for a, b in zip(state, out, strict=True)]
            if grown == state and inside == before:
                return grown
            state = grown

    def inside_of(self, eqn: Any, decided_by: Differs) -> contextlib.AbstractContextManager[Any]:
        return self._enter(self.divergent | decided_by, self.times)

    def decide(self, eqn: Any, values: list[Differs], decided_by: Differs) -> list[Differs]:
        return [v | decided_by for v in values]


def get_named_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """Return the mesh axes over which an operation communicates."""
    axes = params.get("axes", params.get("axis_name", ()))
    flat = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in flat if isinstance(a, str))


@called("strategy.run")
def _explain_must_be_equal(eqn: Any) -> str:
    return (
        f"{name_call()}: {eqn.params['what']} may differ between replicas, at "
        f"{_compat.find_source(eqn)}.\n\n"
        "The sharded update gives each replica a piece of every array, so whatever is not a "
        "gradient has to be the same on all of them.\n\n"
        "All-reduce it first: get_replica_context().all_reduce('mean', value). If it is the "
        "same for a reason that the trace does not show, say so with "
        "jaxdist.assume_replicated(value)."
    )


def _explain_gather(eqn: Any) -> str:
    """Explain that a parameter in pieces is gathered where some replicas may not be."""
    aval = max((v.aval for v in (*eqn.invars, *eqn.outvars)), key=lambda aval: aval.size)
    what = f"The parameter {aval.dtype}{list(aval.shape)}, which is in pieces,"
    return (
        f"{what} is used at {_compat.find_caller_of_library(eqn)}, inside a branch or loop whose "
        "condition may differ between replicas.\n\n"
        "It is gathered from all replicas where it is used. Some of them would never reach that "
        "place, and the others would wait for them forever.\n\n"
        "Gather it before the branch or loop, and use the result inside: "
        "model = jaxdist.partition.gather(model), in a loss that is differentiated inside of it. "
        "If the condition is the same on all replicas for a reason that the trace does not show, "
        "say so: jaxdist.assume_replicated(condition)."
    )


def _explain_may_not_reach(where: str, name: str) -> str:
    article = "An" if name.startswith("a") else "A"
    return (
        f"{article} {name} at {where} is inside a branch or loop whose condition may "
        "differ between replicas.\n\n"
        "Some replicas would never reach the collective, and the others would wait for them "
        "forever.\n\n"
        "Either make the condition the same everywhere before branching (all_reduce it: "
        "any = get_replica_context().all_reduce('sum', flag) > 0), or move the collective out of "
        "the branch and choose with jnp.where. If the condition is the same on all replicas for a "
        "reason that the trace does not show, say so: jaxdist.assume_replicated(condition)."
    )
