"""One update on pieces: reduce-scatter, update, all-gather. See Note [Update on pieces]."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import _collectives
from jaxdist._called import called
from jaxdist._collectives import ReduceOp, finish_sum, prepare_summands
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._update.checks import check_pieces
from jaxdist._update.leaves import Cuts, Leaves
from jaxdist._update.nested import SHARDED
from jaxdist._update.rules import PieceInterpreter
from jaxdist._update.values import Piece, Value, Whole, scatter_sum
from jaxdist._values import Cut, Sharded

CALLER = SHARDED


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of a `sharded_update`, with its mesh and options."""

    update: Callable[..., tuple[PyTree, PyTree]]
    op: ReduceOp
    layout: ReplicaMesh
    min_bytes: float | None

    def run(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        extra: dict[str, Any],
        *,
        gives_params: bool,
    ) -> tuple[PyTree, PyTree]:
        """Return the updates or new parameters, whole on every replica, and the new state."""
        given_trees = (grads, state, params, extra)
        names = ("grads", "state", "params", "extra arguments")
        parts = list(map(Leaves.flatten, given_trees, names))
        for part in parts[:3]:
            check_pieces(part)
        cuts = Cuts(self.layout, self.min_bytes, parts[2])
        reduced = self._reduce_gradients(parts[0], cuts)
        given = [self._as_values(p, cuts) for p in parts[1:3]]
        # `optax.lbfgs` takes the gradients a second time, as an extra argument. Reuse their pieces,
        # since the array itself is not reduced.
        known = {id(x): v for x, v in zip(parts[0].arrays, reduced, strict=True)}
        others = [
            known.get(id(x)) or _wrap_extra(x, name, self.layout)
            for x, name in zip(parts[3].arrays, parts[3].names, strict=True)
        ]
        new_leaves: list[Leaves] = []

        def flat(*arrays: Any) -> list[Any]:
            rest = iter(arrays)
            own_grads, own_state, own_params, own_extra = (part.rebuild(rest) for part in parts)
            first, after = self.update(own_grads, own_state, own_params, **own_extra)
            # Inside the traced function, so that the addition runs on pieces too.
            if gives_params:
                first = optax.apply_updates(own_params, first)
            new_leaves[:] = [Leaves.flatten(first, "updates"), Leaves.flatten(after, "state")]
            return [*new_leaves[0].arrays, *new_leaves[1].arrays]

        traced = jax.make_jaxpr(flat)(*(a for part in parts for a in part.shape_structs()))
        inputs = [v for values in (reduced, *given, others) for v in values]
        results = PieceInterpreter(self.layout).run(traced, inputs)
        count = len(new_leaves[0].arrays)
        # An update of a `Sharded` gradient or parameter stays `Sharded`; all others are gathered.
        in_pieces = {
            path: array.cut
            for part in (parts[0], parts[2])
            for array, path in zip(part.arrays, part.paths, strict=True)
            if isinstance(array, Sharded)
        }
        first = [
            v.whole() if path not in in_pieces else _as_sharded(v, in_pieces[path])
            for v, path in zip(results[:count], new_leaves[0].paths, strict=True)
        ]
        after = self._collect_state(results[count:], new_leaves[1], parts[1], cuts)
        return new_leaves[0].rebuild(first), new_leaves[1].rebuild(after)

    @called(CALLER)
    def _reduce_gradients(self, grads: Leaves, cuts: Cuts) -> list[Value]:
        """Return the gradients, reduced over all replicas; large ones in pieces."""
        count = self.layout.num_replicas
        found = zip(grads.arrays, grads.paths, strict=True)
        cut_leaves = [(g, _cut_of_gradient(g, p, cuts)) for g, p in found]
        small = [g for g, c in cut_leaves if c is None and not isinstance(g, Sharded)]
        # One call for all small leaves, so that they share an all-reduce.
        sums = iter(_collectives.all_reduce(self.op, small, self.layout))
        values: list[Value] = []
        for array, cut in cut_leaves:
            # The gradient of a `Sharded` parameter is already the mean: the transpose of its
            # gather is a reduce-scatter.
            if isinstance(array, Sharded):
                times = 1 if self.op is ReduceOp.MEAN else count
                held = array.array if times == 1 else array.array * times
                values.append(Piece(held, array.cut, self.layout))
            elif cut is None:
                values.append(Whole(next(sums), self.layout))
            else:
                summands = prepare_summands(self.op, array, count)
                piece = scatter_sum(summands, cut, self.layout)
                mean = finish_sum(self.op, piece, array.dtype, count)
                values.append(Piece(mean, cut, self.layout))
        return values

    def _as_values(self, part: Leaves, cuts: Cuts) -> list[Value]:
        """Return the values of the parameters, or of the state."""
        values: list[Value] = []
        for array, name, path in zip(part.arrays, part.names, part.paths, strict=True):
            if isinstance(array, Sharded):
                values.append(Piece(array.array, array.cut, self.layout))
                continue
            value: Value = Whole(array, self.layout, name)
            cut = cuts.cut_of_leaf(array, path)
            # This `Piece` also holds the whole array: operations run on the piece, and one that
            # needs the whole array gets it without an all-gather.
            if cut is not None:
                value = Piece(value.piece(cut), cut, self.layout, array)
            values.append(value)
        return values

    def _collect_state(
        self, values: Sequence[Value], after: Leaves, old_state: Leaves, cuts: Cuts
    ) -> list[Any]:
        """Return the new state, sharded like the old one; `cuts` decides for whole leaves."""
        # If the transformation changed the structure of its state, leaves have no old layout.
        before: Sequence[Any] = [None] * len(values)
        if after.treedef == old_state.treedef and len(old_state.arrays) == len(values):
            before = old_state.arrays
        new_leaves: list[Any] = []
        for value, old, new, path in zip(values, before, after.arrays, after.paths, strict=True):
            cut = old.cut if isinstance(old, Sharded) else cuts.cut_of_leaf(new, path)
            new_leaves.append(value.whole() if cut is None else _as_sharded(value, cut))
        return new_leaves


def _as_sharded(value: Value, cut: Cut) -> Sharded:
    return Sharded(value.piece(cut), *cut)


def _cut_of_gradient(grad: Any, path: str, cuts: Cuts) -> Cut | None:
    # `all_reduce` handles integer gradients, as without `sharded_update`.
    if isinstance(grad, Sharded) or not jnp.issubdtype(grad.dtype, jnp.inexact):
        return None
    return cuts.cut_of_leaf(grad, path)


def _wrap_extra(array: Any, name: str, layout: ReplicaMesh) -> Whole:
    """Return the value of an extra argument."""
    # Mark scalars here, so that the error names a loss that the step did not all-reduce.
    value = Whole(array, layout, name)
    return value if np.ndim(array) else Whole(value.check_replicated(), layout, name)
