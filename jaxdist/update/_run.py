"""One update, in pieces: reduce-scatter, update, all-gather."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import collectives
from jaxdist._typing import PyTree
from jaxdist.collectives import ReduceOp
from jaxdist.mesh import ReplicaMesh
from jaxdist.update._checks import check_pieces
from jaxdist.update._cuts import Cuts
from jaxdist.update._leaves import Leaves
from jaxdist.update._nested import SHARDED
from jaxdist.update._partitioned import Partitioned
from jaxdist.update._values import Piece, Replicas, Value, Whole
from jaxdist.values import Cut, Sharded

CALLER = SHARDED


@dataclasses.dataclass(frozen=True)
class Step:
    """What one update is made of."""

    update: Callable[..., tuple[PyTree, PyTree]]
    op: ReduceOp
    layout: ReplicaMesh
    cuts: Cuts

    def run(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        extra: dict[str, Any],
        *,
        gives_params: bool,
    ) -> tuple[PyTree, PyTree]:
        """Updates, or new parameters, whole on every replica; and the new state."""
        replicas = Replicas(self.layout)
        parts = [
            Leaves.of(grads, "grads"),
            Leaves.of(state, "state"),
            Leaves.of(params, "params"),
            Leaves.of(extra, "extra arguments"),
        ]
        check_pieces(parts[1], self.layout)
        reduced = self._reduced(parts[0].arrays, replicas)
        given = [[self._value(x, n, replicas) for x, n in _named(p)] for p in parts[1:3]]
        # `optax.lbfgs` takes the gradients twice.
        known = {id(x): v for x, v in zip(parts[0].arrays, reduced, strict=True)}
        others = [known.get(id(x)) or _extra(x, n, replicas) for x, n in _named(parts[3])]
        made: list[Leaves] = []

        def flat(*arrays: Any) -> list[Any]:
            rest = list(arrays)
            trees = []
            for part in parts:
                count = len(part.arrays)
                trees.append(part.rebuilt(rest[:count]))
                del rest[:count]
            first, after = self.update(trees[0], trees[1], trees[2], **trees[3])
            if gives_params:
                first = optax.apply_updates(trees[2], first)
            made[:] = [Leaves.of(first, "updates"), Leaves.of(after, "state")]
            return [*made[0].arrays, *made[1].arrays]

        traced = jax.make_jaxpr(flat)(*(a for part in parts for a in part.abstract()))
        inputs = [v for values in (reduced, *given, others) for v in values]
        results = Partitioned(replicas).run(traced, inputs)
        count = len(made[0].arrays)
        whole = [v.whole() for v in results[:count]]
        return made[0].rebuilt(whole), made[1].rebuilt(self._state(results[count:], made[1], parts))

    def _reduced(self, grads: Sequence[Any], replicas: Replicas) -> list[Value]:
        """The gradients of all replicas together: large ones in pieces."""
        cuts = [self._cut_of(g) for g in grads]
        small = [g for g, c in zip(grads, cuts, strict=True) if c is None]
        sums = iter(collectives.all_reduce(CALLER, self.op, small, replicas.layout))
        values: list[Value] = []
        for array, cut in zip(grads, cuts, strict=True):
            if cut is None:
                values.append(Whole(next(sums), replicas))
                continue
            piece = replicas.scatter_sum(array, cut)
            if self.op is ReduceOp.MEAN:
                piece = piece / replicas.count
            values.append(Piece(piece, cut, replicas))
        return values

    def _value(self, array: Any, name: str, replicas: Replicas) -> Value:
        """A parameter, or a part of the state."""
        if isinstance(array, Sharded):
            return Piece(array.array, array.cut, replicas)
        whole = Whole(array, replicas, name)
        cut = cut_of_state(array, self.cuts)
        if cut is None:
            return whole
        # Both forms are there: what is computed from it is computed in pieces.
        return Piece(whole.piece(cut), cut, replicas, array)

    def _cut_of(self, array: Any) -> Cut | None:
        is_float = jnp.issubdtype(array.dtype, jnp.inexact)
        return self.cuts.of(tuple(array.shape)) if is_float else None

    def _state(self, values: Sequence[Value], after: Leaves, parts: Sequence[Leaves]) -> list[Any]:
        """The new state, cut as it came in; what came in whole is cut where the rule says so."""
        before: Sequence[Any] = [None] * len(values)
        if after.treedef == parts[1].treedef and len(parts[1].arrays) == len(values):
            before = parts[1].arrays
        made: list[Any] = []
        for value, old, new in zip(values, before, after.arrays, strict=True):
            cut = old.cut if isinstance(old, Sharded) else cut_of_state(new, self.cuts)
            made.append(value.whole() if cut is None else Sharded(value.piece(cut), *cut))
        return made


def _extra(array: Any, name: str, replicas: Replicas) -> Whole:
    """An extra argument. A loss that is not all-reduced is told by its name."""
    value = Whole(array, replicas, name)
    return value if np.ndim(array) else Whole(value.proved(), replicas, name)


def cut_of_state(array: Any, cuts: Cuts) -> Cut | None:
    """How a leaf of the state is cut; random keys are not."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return None
    return cuts.of(tuple(array.shape))


def _named(part: Leaves) -> list[tuple[Any, str]]:
    return list(zip(part.arrays, part.names, strict=True))
