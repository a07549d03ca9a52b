"""Proof, from the traced program, of which values are the same on all replicas.

For every value: the set of replica axes over which it may differ. Replicated inputs differ over
none; a reduction over an axis takes it out, `axis_index` and permutations put it in, and every
operation that is not on the allow-list puts all in.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist._collectives import ASSUME_REPLICATED, REQUIRE_REPLICATED
from jaxdist._program.jaxprs import primitives as known
from jaxdist._program.jaxprs.subprograms import inner_inputs, subprograms
from jaxdist._values import OPEN, PIECE, Cut
from jaxdist.errors import DivergentCollectiveError, StateDivergenceError

Differs: TypeAlias = frozenset[str]
NONE: Differs = frozenset()


@dataclasses.dataclass(frozen=True)
class TracedCollective:
    """A collective as the step asked for it."""

    kind: str
    axes: tuple[str, ...]
    bytes_per_device: int
    operands: int
    grouped: bool
    source: str
    times: int | None  # how often it runs in a step; None where a loop decides while running
    # Of one that is part of an all-reduce: which algorithm, why, what else there was, with its
    # predicted seconds, and which hints were not followed.
    algorithm: str = ""
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()
    ignored: tuple[str, ...] = ()
    pack_bytes: int = 0

    def __repr__(self) -> str:
        times = "" if self.times == 1 else f" x {self.times or '(a while loop)'}"
        groups = " in groups" if self.grouped else ""
        return (
            f"{self.kind} over {', '.join(self.axes)}{groups}: {self.operands} operand(s), "
            f"{self.bytes_per_device:,} bytes per device{times}, asked for at {self.source}"
            + (f", by {self.algorithm}" if self.algorithm else "")
        )


@dataclasses.dataclass(frozen=True)
class Replication:
    """What the analysis found."""

    outputs: tuple[Differs, ...]
    collectives: tuple[TracedCollective, ...]


def analyse(jaxpr: Any, inputs: Sequence[Differs], axes: Differs) -> Replication:
    """Analyse an open or closed jaxpr of one replica.

    Args:
        jaxpr: The traced step.
        inputs: For each input, the axes over which it may differ.
        axes: The replica axes of size two and more.

    Raises:
        DivergentCollectiveError: A collective that some replicas may not reach.
    """
    walk = _Walk(axes)
    outputs = walk.jaxpr(jaxpr, list(inputs), NONE, 1)
    return Replication(tuple(outputs), tuple(walk.found.values()))


def results_of(eqn: Any, inputs: Sequence[Differs], axes: Differs) -> list[Differs]:
    """For each result of one equation, the axes over which it may differ."""
    return _Walk(axes).equation(eqn, list(inputs), NONE, 1)


def results_of_program(program: Any, inputs: Sequence[Differs], axes: Differs) -> list[Differs]:
    """For each result of a sub-program, the axes over which it may differ."""
    return _Walk(axes).jaxpr(program, list(inputs), NONE, 1)


class _Walk:
    """One pass over a program; `under` are the axes over which control flow may differ."""

    def __init__(self, axes: Differs) -> None:
        self.axes = axes
        # Keyed by the way to the equation: a fixpoint comes by more than once, and one jitted
        # function may be called from several places.
        self.found: dict[tuple[int, ...], TracedCollective] = {}
        self.way: tuple[int, ...] = ()
        # Of the all-reduce that is being walked: how it goes, and the line that asked for it.
        self.plan: Any = None
        self.source = ""

    def jaxpr(
        self, jaxpr: Any, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        env: dict[Any, Differs] = dict.fromkeys(jaxpr.constvars, NONE)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        came_by = self.way

        def read(atom: Any) -> Differs:
            return NONE if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            self.way = (*came_by, id(eqn))
            results = self.equation(eqn, [read(v) for v in eqn.invars], under, times)
            env.update(zip(eqn.outvars, (r | under for r in results), strict=True))
        self.way = came_by
        return [read(v) for v in jaxpr.outvars]

    def equation(
        self, eqn: Any, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        name = eqn.primitive.name
        joined = NONE.union(*inputs)
        if name in known.REPLICATING or name in known.VARYING:
            return self._collective(eqn, name, joined, under, times)
        if eqn.primitive is ASSUME_REPLICATED:
            return [NONE]
        if eqn.primitive is PIECE:
            return [joined - self._over(eqn.params["cut"])]
        if eqn.primitive is OPEN:
            return [joined | self._over(eqn.params["cut"])]
        if eqn.primitive is REQUIRE_REPLICATED:
            if joined:
                raise StateDivergenceError(_must_be_equal(eqn))
            return inputs
        if name in known.PAIRWISE:
            return inputs
        if name in known.CALLS and known.CALLS[name] in eqn.params:
            return self._call(eqn, name, inputs, under, times)
        if name == "scan":
            return self._scan(eqn, inputs, under, times)
        if name == "while":
            return self._while(eqn, inputs, under)
        if name == "cond":
            return self._cond(eqn, inputs, under, times)
        if name == "custom_linear_solve":
            return self._linear_solve(eqn, inputs, under, times)
        if name in known.FIRST_ORDER and not eqn.effects:
            return [joined] * len(eqn.outvars)
        for inner in subprograms(eqn):
            self.jaxpr(inner, [self.axes] * len(inner_inputs(inner)), under, None)
        return [self.axes] * len(eqn.outvars)

    def _over(self, cut: Cut) -> Differs:
        return self.axes if cut.axes is None else self.axes & frozenset(cut.axes)

    def _call(
        self, eqn: Any, name: str, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        around = self.plan, self.source
        if "plan" in eqn.params:
            self.plan, self.source = eqn.params["plan"], _compat.source_of(eqn)
        results = self.jaxpr(eqn.params[known.CALLS[name]], inputs, under, times)
        self.plan, self.source = around
        return results

    def _collective(
        self, eqn: Any, name: str, joined: Differs, under: Differs, times: int | None
    ) -> list[Differs]:
        named = named_axes(eqn.params)
        over = frozenset(named) & self.axes
        grouped = eqn.params.get("axis_index_groups") is not None
        if name in known.COLLECTIVES and named:
            if over & under:
                where = self.source or _compat.source_of(eqn)
                raise DivergentCollectiveError(_may_not_reach(where, name))
            if over:
                self.found[self.way] = self._record(eqn, name, named, times)
        if name in known.REPLICATING and not grouped:
            result = joined - over
        else:
            result = joined | over
        return [result] * len(eqn.outvars)

    def _record(
        self, eqn: Any, name: str, named: tuple[str, ...], times: int | None
    ) -> TracedCollective:
        avals = [v.aval for v in eqn.invars]
        return TracedCollective(
            name,
            named,
            sum(int(a.size) * a.dtype.itemsize for a in avals),
            len(avals),
            eqn.params.get("axis_index_groups") is not None,
            self.source or _compat.source_of(eqn),
            times,
            algorithm=getattr(self.plan, "algorithm", ""),
            reason=getattr(self.plan, "reason", ""),
            alternatives=tuple(getattr(self.plan, "alternatives", ())),
            ignored=tuple(getattr(self.plan, "ignored", ())),
            pack_bytes=getattr(self.plan, "pack_bytes", 0),
        )

    def _scan(
        self, eqn: Any, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        consts, carry = _compat.scan_counts(eqn.params)
        inside = None if times is None else times * eqn.params["length"]
        held, state, rows = (
            inputs[:consts],
            inputs[consts : consts + carry],
            inputs[consts + carry :],
        )
        while True:
            out = self.jaxpr(eqn.params["jaxpr"], held + state + rows, under, inside)
            grown = [a | b for a, b in zip(state, out[:carry], strict=True)]
            if grown == state:
                # Not `out`: after no trip at all, what comes out is what went in.
                return grown + out[carry:]
            state = grown

    def _while(self, eqn: Any, inputs: list[Differs], under: Differs) -> list[Differs]:
        p = eqn.params
        split = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        of_cond, of_body, state = (
            inputs[: split[0]],
            inputs[split[0] : split[1]],
            inputs[split[1] :],
        )
        inside = under
        while True:
            came_in = inside
            goes_on = self.jaxpr(p["cond_jaxpr"], of_cond + state, inside, None)
            inside = inside | goes_on[0]
            out = self.jaxpr(p["body_jaxpr"], of_body + state, inside, None)
            grown = [a | b | inside for a, b in zip(state, out, strict=True)]
            # The condition itself is computed only by those that are not done.
            if grown == state and inside == came_in:
                return grown
            state = grown

    def _linear_solve(
        self, eqn: Any, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        """Of the functions that it holds, only `solve` is run."""
        lengths = eqn.params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        rows = inputs[sum(lengths) :]
        held = inputs[start : start + lengths.solve]
        return self.jaxpr(eqn.params["jaxprs"].solve, held + rows, under, times)

    def _cond(
        self, eqn: Any, inputs: list[Differs], under: Differs, times: int | None
    ) -> list[Differs]:
        inside = under | inputs[0]
        outs = [self.jaxpr(b, inputs[1:], inside, times) for b in eqn.params["branches"]]
        return [inside.union(*results) for results in zip(*outs, strict=True)]


def named_axes(params: dict[str, Any]) -> tuple[str, ...]:
    """The mesh axes that an operation goes over."""
    axes = params.get("axes", params.get("axis_name", ()))
    flat = axes if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in flat if isinstance(a, str))


def _must_be_equal(eqn: Any) -> str:
    return (
        f"strategy.run: {eqn.params['what']} may differ between replicas, at "
        f"{_compat.source_of(eqn)}.\n\n"
        "The sharded update gives each replica a piece of every array, so whatever is not a "
        "gradient has to be the same on all of them.\n\n"
        "All-reduce it first: get_replica_context().all_reduce('mean', value). Where it is the "
        "same for a reason that the trace does not show, say so with "
        "jaxdist.assume_replicated(value)."
    )


def _may_not_reach(where: str, name: str) -> str:
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
