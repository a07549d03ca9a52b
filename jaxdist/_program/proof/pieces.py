"""Proof that a step uses sharded arrays only where a piece gives the result of the whole array."""

# Note [Whole shapes, local pieces]
#
# A step that uses sharded arrays is traced with their whole shapes, as if each replica had the
# whole array. At run time each replica has one piece. An elementwise operation on the piece gives
# the piece of the result; other operations do not (the norm of a piece is not the norm of the
# array).
#
# `ShardingProof` (this file) therefore accepts pieces only as operands of elementwise operations,
# together with values that are equal on all replicas, of operations along dims that are not cut
# (uncut_dims.py: a slice, a row, a sum over layers), and of reductions of booleans and integers,
# which are computed from all pieces. It raises for every other operation.
# `LocalPieces` (local_pieces.py) then evaluates the trace on the pieces. `PIECE` declares that a
# value is a piece of an array, and `OPEN` returns the piece as an array of its own.

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxdist import _compat
from jaxdist._called import called, name_call
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.interpreter import ForwardAnalysis
from jaxdist._program.jaxprs.primitives import LAYOUT_ONLY
from jaxdist._program.proof import uncut_dims
from jaxdist._program.proof.replication import NONE, Differs, analyse_equation
from jaxdist._values import ELEMENTWISE, OPEN, PIECE, REDUCED_PIECES, Cut, is_exact_reduction
from jaxdist.errors import ShardedArrayError

# Operations that return their operands unchanged, one result for each operand.
SAME = frozenset({"name", "optimization_barrier", REDUCED_PIECES.name} | LAYOUT_ONLY)


@dataclasses.dataclass(frozen=True)
class ShardFact:
    """The facts about one value."""

    differs: Differs  # the axes over which it may differ
    # How the replicas cut the array that it is a piece of, without splits; None if it is no piece.
    cut: Cut | None = None
    is_uniform: bool = False  # whether all elements are one number, equal on all replicas


class ShardingProof(ForwardAnalysis[ShardFact]):
    """The analysis of which values are pieces of one array.

    Args:
        layout: The layout of the strategy.
        axes: The replica axes of size two and more.

    Raises:
        ShardedArrayError: From `run` and `equation`: an operation would see a piece instead of
            the whole array.
    """

    of_constants = ShardFact(NONE, is_uniform=True)
    # Inside a `shard_map` of the user, arrays have other shapes.
    not_entered = frozenset({"shard_map"})

    def __init__(self, layout: ReplicaMesh, axes: Differs) -> None:
        self.layout = layout
        self._axes = axes
        # The names of results that are declared as pieces without a proof that they are.
        self.wrong: dict[str, None] = {}

    def constant(self, variable: Any, value: Any) -> ShardFact:
        return ShardFact(NONE, None, _has_one_element(variable))

    def join(self, eqn: Any, aval: Any, first: ShardFact, second: ShardFact) -> ShardFact:
        if first == second:
            return first
        for one, other in ((first, second), (second, first)):
            if one.cut is None:
                continue
            # A value that is equal on all replicas can be cut locally, so it joins with a piece.
            if other.differs:
                _refuse(eqn, one, "they are joined with values that differ for another reason")
            return one
        is_uniform = first.is_uniform and second.is_uniform
        return ShardFact(first.differs | second.differs, None, is_uniform)

    def operation(self, eqn: Any, inputs: list[ShardFact]) -> list[ShardFact]:
        name = eqn.primitive.name
        if eqn.primitive is PIECE:
            return [self._declare(eqn, inputs[0])]
        if eqn.primitive is OPEN:
            return [self._open(eqn, inputs[0])]
        if name in SAME:
            return inputs
        pieces = [s for s in inputs if s.cut is not None]
        if not pieces:
            found = analyse_equation(eqn, [s.differs for s in inputs], self._axes)
            one = _is_result_uniform(eqn, inputs)
            # A uniform value must be equal on all replicas: `LocalPieces` slices it at 0 for each.
            return [
                ShardFact(d, None, not d and (one or _has_one_element(v)))
                for d, v in zip(found, eqn.outvars, strict=True)
            ]
        if not eqn.outvars:
            return []
        [first, *_] = pieces
        if first.cut is not None and is_exact_reduction(eqn, first.cut):
            return [ShardFact(first.differs - frozenset(first.cut.over(self.layout)))]
        if uncut_dims.has_rule(eqn):
            return self._follow(eqn, inputs)
        if name not in ELEMENTWISE or len(eqn.outvars) != 1:
            _refuse(eqn, pieces[0], f"{name} needs more of an array than one element at a time")
        _check_together(eqn, inputs, pieces[0])
        shape = eqn.outvars[0].aval.shape
        for s, v in zip(inputs, eqn.invars, strict=True):
            # A cut dim of one element that broadcasts would be cut along another size.
            if s.cut is not None and v.aval.shape[s.cut.dim] != shape[s.cut.dim]:
                _refuse(eqn, s, f"{name} broadcasts them along the dim that is cut")
        return [pieces[0]]

    def _follow(self, eqn: Any, inputs: list[ShardFact]) -> list[ShardFact]:
        """Return the facts of an operation along dims that are not cut."""
        name, count = eqn.primitive.name, uncut_dims.count_arrays(eqn)
        piece = next(s for s in inputs if s.cut is not None)
        cut = inputs[0].cut or piece.cut
        if cut is None or any(s.cut is not None for s in inputs[count:]):
            _refuse(eqn, piece, f"{name} takes its indices from them")
        _check_together(eqn, inputs, piece)
        moved = uncut_dims.follow(eqn, cut, cut.rows(cut.pieces(self.layout)))
        if moved.cut is None:
            _refuse(eqn, piece, f"{name} changes dim {cut.dim}, along which they are cut")
        return [ShardFact(piece.differs, moved.cut)] * len(eqn.outvars)

    def _declare(self, eqn: Any, given: ShardFact) -> ShardFact:
        cut = eqn.params["cut"].without_splits()
        if given.cut is not None and given.cut != cut:
            _refuse(eqn, given, "they are declared to be pieces that are cut differently")
        if cut.pieces(self.layout) == 1:
            return ShardFact(NONE)
        over = frozenset(cut.over(self.layout)) & self._axes
        copies = given.differs - over - frozenset(eqn.params["others"])
        if copies:
            axes = [a for a in self.layout.replica_axes if a in copies]
            raise ShardedArrayError(_explain_unequal_copies(eqn, cut.over(self.layout), axes))
        return ShardFact(over, cut)

    @called("strategy.run")
    def _open(self, eqn: Any, given: ShardFact) -> ShardFact:
        """Return the fact of `OPEN`: its operand must be in pieces, or equal on all replicas."""
        cut = eqn.params["cut"].without_splits()
        if given.cut is None and given.differs:
            if not eqn.params["name"]:
                source = _compat.find_source(eqn)
                aval = eqn.invars[0].aval
                found = [f"{aval.dtype}{list(aval.shape)}"]
                raise ShardedArrayError(
                    _explain_not_pieces(f"{name_call()}, at {source}, uses", found)
                )
            self.wrong[eqn.params["name"]] = None
        if given.cut is not None and given.cut != cut:
            _refuse(eqn, given, "a node of an array that is cut differently holds them")
        return ShardFact(frozenset(cut.over(self.layout)) & self._axes)

    def inside_of(self, eqn: Any, decided_by: ShardFact) -> contextlib.AbstractContextManager[Any]:
        if decided_by.cut is not None:
            is_branch = eqn.primitive.name == "cond"
            why = "they choose a branch" if is_branch else "they decide when a loop ends"
            _refuse(eqn, decided_by, why)
        return super().inside_of(eqn, decided_by)

    def decide(self, eqn: Any, values: list[ShardFact], decided_by: ShardFact) -> list[ShardFact]:
        if not decided_by.differs:
            return values
        what = "a branch" if eqn.primitive.name == "cond" else "the end of a loop"
        for s in values:
            if s.cut is not None:
                _refuse(eqn, s, f"{what} depends on values that differ between replicas")
        return [ShardFact(s.differs | decided_by.differs) for s in values]

    def rows(self, eqn: Any, given: list[ShardFact], avals: Sequence[Any] = ()) -> list[ShardFact]:
        """Return the facts of one row of each array that a scan iterates over."""
        found = []
        for s in given:
            if s.cut is not None and s.cut.dim == 0:
                _refuse(eqn, s, "a scan iterates over the dim that is cut")
            cut = None if s.cut is None else s.cut.before(0)
            found.append(dataclasses.replace(s, cut=cut))
        return found

    def stack(self, eqn: Any, rows: list[ShardFact], avals: Sequence[Any]) -> list[ShardFact]:
        # A row that is uniform in each iteration may have another number in the next one.
        return [ShardFact(s.differs, s.cut and s.cut.insert_dim(0)) for s in rows]

    # A solver on a piece would solve for the piece as if it were the whole array.
    linear_solve = operation


def _check_together(eqn: Any, inputs: Sequence[ShardFact], piece: ShardFact) -> None:
    """Check that all operands are cut alike, or equal on all replicas."""
    name = eqn.primitive.name
    for s, v in zip(inputs, eqn.invars, strict=True):
        if s.cut is None and s.differs:
            _refuse(eqn, piece, f"{name} combines them with {_describe(v)}")
        if s.cut is not None and s.cut != piece.cut:
            _refuse(eqn, piece, f"{name} combines them with pieces that are cut differently")


@called("strategy.run")
def check_results(names: Sequence[str]) -> None:
    """Check that no result is declared as a piece without a proof.

    Raises:
        ShardedArrayError: Some results are. The error has their names.
    """
    if names:
        raise ShardedArrayError(_explain_not_pieces(f"{name_call()} would return", names))


def _explain_not_pieces(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (
        f"{what} {len(names)} array(s) in pieces that are not proved to be "
        f"pieces of one array: {', '.join(names[:10])}{more}.\n\n"
        "They are computed from values that differ between replicas for other reasons than where "
        f"the array is cut.\n\n{_TO_GATHER} {_IN_OPTIMIZERS} If a value is a piece for a "
        "reason that the trace does not show, declare it: Sharded(array, dim, size)."
    )


@called("strategy.run")
def _explain_unequal_copies(eqn: Any, over: Sequence[str], axes: Sequence[str]) -> str:
    aval, source = eqn.outvars[0].aval, _compat.find_source(eqn)
    return (
        f"{name_call()}{f', at {source}' if source else ''}: {aval.dtype}{list(aval.shape)} is "
        f"declared to be a sharded array in pieces over the replica axes {list(over)}, and the "
        f"declared values may differ over {axes} too.\n\n"
        f"Replicas that differ only on {axes} hold copies of one piece, so they must declare the "
        "same values.\n\n"
        "Reduce it over these axes before: jax.lax.pmean(piece, "
        f"{(axes[0] if len(axes) == 1 else tuple(axes))!r}). If it is a gradient with respect to "
        "value.array, take it with respect to the whole array: value[...] or "
        "jaxdist.partition.gather(value). If a value is the same for a reason that the "
        "trace does not show, declare it: jaxdist.assume_replicated(piece)."
    )


_OF_OPTIMIZERS = (
    "Let sharded_update do what needs whole arrays: jaxdist.sharded_update(tx) instead of tx "
    "gives the result of whole arrays for any optax transformation."
)
_IN_OPTIMIZERS = (
    "In an optimizer, jaxdist.sharded_update(tx) instead of tx gives the result of whole arrays."
)
_TO_GATHER = (
    "Gather the array before, jaxdist.partition.gather(tree); value.array is the piece itself, "
    "if that is intended."
)


@called("strategy.run")
def _refuse(eqn: Any, piece: ShardFact, why: str) -> NoReturn:
    cut = piece.cut
    where = "" if cut is None else f" (dim {cut.dim}, of {cut.size} elements)"
    source = _compat.find_source(eqn)
    # Functions that JAX compiles by themselves, such as a norm, do not record their caller.
    unknown = _TO_GATHER if source else f"{_TO_GATHER} {_IN_OPTIMIZERS}"
    remedy = _OF_OPTIMIZERS if _compat.is_from_library(eqn, "optax") else unknown
    raise ShardedArrayError(
        f"{name_call()}{f', at {source}' if source else ''}: an operation would see the "
        f"pieces{where} that a replica holds of a sharded array instead of the array: "
        f"{why}.\n\n"
        "The result would not be that of the whole array, and would differ between replicas."
        f"\n\n{remedy}"
    )


def _describe(variable: Any) -> str:
    aval = variable.aval
    return f"{aval.dtype}{list(aval.shape)}, which differs between replicas: all-reduce it first"


def _has_one_element(variable: Any) -> bool:
    shape: tuple[int, ...] = tuple(getattr(variable.aval, "shape", ()))
    return all(n == 1 for n in shape)


def _is_result_uniform(eqn: Any, inputs: Sequence[ShardFact]) -> bool:
    """Whether each result is uniform because all operands are."""
    name = eqn.primitive.name
    keeps = name in ELEMENTWISE or name in ("broadcast_in_dim", "reshape", "squeeze", "transpose")
    operands = zip(inputs, eqn.invars, strict=True)
    return keeps and all(
        s.is_uniform or (not s.differs and _has_one_element(v)) for s, v in operands
    )
