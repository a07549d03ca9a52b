"""Proof, from the traced program, that a step treats pieces as pieces of one array.

A function of pytrees, such as an optimizer, finds in a `Sharded` node the piece that this replica
holds. What it does element by element is what it would do with the whole array; a norm of a
piece is not the norm of the array. So pieces may go through operations that are known to work on
each element by itself, with scalars that are the same on all replicas, and through no other.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from jax.extend.core import Literal

from jaxdist import _compat
from jaxdist.errors import ShardedArrayError
from jaxdist.mesh import ReplicaMesh
from jaxdist.program import _primitives as known
from jaxdist.program._replication import NONE, Differs, results_of
from jaxdist.values import ELEMENTWISE, OPEN, PIECE, Cut

# The result is the operand, whatever it is; for several operands, each its own.
_SAME = frozenset({"name", "sharding_constraint", "optimization_barrier", "pvary", "pcast"})


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of one value."""

    differs: Differs  # the axes over which it may differ
    cut: Cut | None = None  # of which array it is a piece
    is_uniform: bool = False  # whether all its elements are one number, the same on all replicas


_NUMBER = Seen(NONE, is_uniform=True)


class PieceWalk:
    """One pass over a program.

    Args:
        layout: Of the strategy.
        axes: The replica axes of size two and more.
    """

    def __init__(self, layout: ReplicaMesh, axes: Differs) -> None:
        self._layout = layout
        self._axes = axes

    def given(self, differs: Differs, cut: Cut | None) -> Seen:
        """An input of the step."""
        return Seen(differs) if cut is None else self._piece(cut)

    def jaxpr(self, program: Any, inputs: Sequence[Seen]) -> list[Seen]:
        """What the results are.

        Raises:
            ShardedArrayError: An operation that would see a piece in the place of an array.
        """
        jaxpr = getattr(program, "jaxpr", program)
        env: dict[Any, Seen] = {v: Seen(NONE, None, _is_one(v)) for v in jaxpr.constvars}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Seen:
            return _NUMBER if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._eqn(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _piece(self, cut: Cut) -> Seen:
        return Seen(frozenset(cut.over(self._layout)) & self._axes, cut)

    def _eqn(self, eqn: Any, inputs: list[Seen]) -> list[Seen]:
        name = eqn.primitive.name
        if eqn.primitive is PIECE:
            return [self._piece(eqn.params["cut"])]
        if eqn.primitive is OPEN:
            return [Seen(inputs[0].differs)]
        if name in _SAME:
            return inputs
        if name in known.CALLS and known.CALLS[name] in eqn.params and name != "shard_map":
            return self.jaxpr(eqn.params[known.CALLS[name]], inputs)
        if name == "scan":
            return self._scan(eqn, inputs)
        if name == "while":
            return self._while(eqn, inputs)
        if name == "cond":
            return self._cond(eqn, inputs)
        pieces = [s for s in inputs if s.cut is not None]
        if not pieces:
            found = results_of(eqn, [s.differs for s in inputs], self._axes)
            one = _makes_one(eqn, inputs)
            return [
                Seen(d, None, not d and (one or _is_one(v)))
                for d, v in zip(found, eqn.outvars, strict=True)
            ]
        if not eqn.outvars:
            return []
        if name not in ELEMENTWISE or len(eqn.outvars) != 1:
            _refuse(eqn, pieces[0], f"{name} needs more of an array than one element at a time")
        for s, v in zip(inputs, eqn.invars, strict=True):
            if s.cut is None and (s.differs or not (s.is_uniform or _is_one(v))):
                _refuse(eqn, pieces[0], f"{name} puts them together with {_described(s, v)}")
            if s.cut is not None and s.cut != pieces[0].cut:
                _refuse(eqn, pieces[0], f"{name} puts them together with pieces cut otherwise")
        return [pieces[0]]

    def _cond(self, eqn: Any, inputs: list[Seen]) -> list[Seen]:
        index, *operands = inputs
        if index.cut is not None:
            _refuse(eqn, index, "a branch is chosen by them")
        rows = [self.jaxpr(b, operands) for b in eqn.params["branches"]]
        results = rows[0]
        for row in rows[1:]:
            results = [_either(a, b) for a, b in zip(results, row, strict=True)]
        return [Seen(s.differs | index.differs) if index.differs else s for s in results]

    def _scan(self, eqn: Any, inputs: list[Seen]) -> list[Seen]:
        consts, carry = _compat.scan_counts(eqn.params)
        held, state = inputs[:consts], inputs[consts : consts + carry]
        rows = inputs[consts + carry :]
        for s in rows:
            if s.cut is not None:
                _refuse(eqn, s, "a scan goes over one of their dims")
        rows = [Seen(s.differs, None, s.is_uniform) for s in rows]
        while True:
            out = self.jaxpr(eqn.params["jaxpr"], [*held, *state, *rows])
            grown = [_either(a, b) for a, b in zip(state, out[:carry], strict=True)]
            if grown == state:
                stacked = [Seen(s.differs, None, s.is_uniform) for s in out[carry:]]
                return [*grown, *stacked]
            state = grown

    def _while(self, eqn: Any, inputs: list[Seen]) -> list[Seen]:
        p = eqn.params
        first, second = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        of_cond, of_body, state = inputs[:first], inputs[first:second], inputs[second:]
        while True:
            [goes_on] = self.jaxpr(p["cond_jaxpr"], [*of_cond, *state])
            if goes_on.cut is not None:
                _refuse(eqn, goes_on, "a loop ends by them")
            out = self.jaxpr(p["body_jaxpr"], [*of_body, *state])
            grown = [_either(a, b) for a, b in zip(state, out, strict=True)]
            if goes_on.differs:
                grown = [Seen(s.differs | goes_on.differs) for s in grown]
            if grown == state:
                return grown
            state = grown


def check_results(found: Sequence[Seen], cuts: dict[int, Cut], names: Sequence[str]) -> None:
    """Refuse results that are declared to be in pieces, and are not proved to be.

    Raises:
        ShardedArrayError: With the names of the results.
    """
    wrong = [
        names[i]
        for i, cut in cuts.items()
        if found[i].cut != cut and not (found[i].is_uniform and not found[i].differs)
    ]
    if not wrong:
        return
    more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    raise ShardedArrayError(
        f"strategy.run would give back {len(wrong)} array(s) in pieces that are not proved to be "
        f"pieces of one array: {', '.join(wrong[:10])}{more}.\n\n"
        "They are computed from values that differ between replicas for other reasons than where "
        f"the array is cut.\n\n{_REMEDY} What is a piece for a reason that the trace does not "
        "show is declared: Sharded(array, dim, size)."
    )


_REMEDY = (
    "Let sharded_update do what needs whole arrays: jaxdist.sharded_update(tx) in the place of tx "
    "gives the result of whole arrays for any optax transformation. Elsewhere gather first, "
    "jaxdist.partition.gather(tree); value.array is the piece by itself, where that is meant."
)


def _refuse(eqn: Any, piece: Seen, why: str) -> NoReturn:
    cut = piece.cut
    where = "" if cut is None else f" (dim {cut.dim}, of {cut.size} elements)"
    source = _compat.source_of(eqn)
    raise ShardedArrayError(
        f"strategy.run{f', at {source}' if source else ''}: an operation would see the "
        f"pieces{where} that a replica holds of a sharded array in the place of the array: "
        f"{why}.\n\n"
        "The number that comes out would not be that of the whole array, and differ between "
        f"replicas.\n\n{_REMEDY}"
    )


def _described(seen: Seen, variable: Any) -> str:
    aval = variable.aval
    what = f"{aval.dtype}{list(aval.shape)}"
    if seen.differs:
        return f"{what}, which differs between replicas: all-reduce it first"
    return f"{what}, which every replica has in the shape of a piece"


def _either(first: Seen, second: Seen) -> Seen:
    """What is known of a value that is one of two."""
    if first == second:
        return first
    for one, other in ((first, second), (second, first)):
        if one.cut is not None and other.is_uniform:
            return one
    return Seen(first.differs | second.differs, None, first.is_uniform and second.is_uniform)


def _is_one(variable: Any) -> bool:
    shape: tuple[int, ...] = tuple(getattr(variable.aval, "shape", ()))
    return all(n == 1 for n in shape)


def _makes_one(eqn: Any, inputs: Sequence[Seen]) -> bool:
    """Whether all elements of the results are one number, as those of the operands are."""
    name = eqn.primitive.name
    keeps = name in ELEMENTWISE or name in ("broadcast_in_dim", "reshape", "squeeze", "transpose")
    operands = zip(inputs, eqn.invars, strict=True)
    return keeps and all(s.is_uniform or (not s.differs and _is_one(v)) for s, v in operands)
