"""Layers that are stacked in one array for each parameter, and that a scan runs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist import _replica
from jaxdist._mesh import ReplicaMesh
from jaxdist._values import (
    Cut,
    Sharded,
    gather_opened,
    is_sharded,
    make_undeclared,
    open_to_gather,
)

M = TypeVar("M", bound=nnx.Module)

# Note [Gathering inside of a scan]
# A scan over sharded parameters may not gather them before: all layers would be whole at once. So
# each parameter is opened once, as the pieces of all layers, and the body gathers its own row. The
# gradient goes the other way: the body scatters the gradient of its row over the replicas of a
# slice, and after the loop one all-reduce for each parameter adds up slices. Matrices are gathered
# in the dtype of the products, so half of the bytes are sent in bfloat16. Sums between slices are
# float32 unless configured, which needs more memory.


def stack(make: Callable[[nnx.Rngs], M], count: int, rngs: nnx.Rngs) -> M:
    """Return one layer whose parameters have those of `count` layers, in a new dim 0.

    The parameters are those that `count` calls of `make(rngs)` would draw one after the other.
    """
    graphdef, before = nnx.split(rngs)
    advanced = nnx.clone(rngs)
    made = make(advanced)
    after = nnx.state(advanced)

    def advance(number: Any) -> Any:
        """Return the state of the random streams before a layer."""

        # Streams count their draws, and each layer draws equally often. Their keys stay.
        def add(start: Any, end: Any) -> Any:
            is_count = jnp.issubdtype(start.dtype, jnp.integer)
            return start + (number * (end - start)).astype(start.dtype) if is_count else start

        return jax.tree.map(add, before, after)

    # One trace, whatever the number of layers.
    numbers = jnp.arange(count)
    nnx.update(made, jax.vmap(lambda n: nnx.state(make(nnx.merge(graphdef, advance(n)))))(numbers))
    nnx.update(rngs, advance(jnp.asarray(count)))
    for _, variable in nnx.iter_graph(made):
        if isinstance(variable, nnx.Variable):
            variable.set_metadata(stacked_layers=True)
    return made


def take(layers: M, number: int) -> M:
    """Return one of stacked layers, outside of a scan. Its parameters are whole."""
    rows = StackedRows.open(layers)
    made: M = rows.make_layer([x[number] for x in rows.arrays])
    return made


def gather_as(value: Any, dtype: Any, sums: Any) -> jax.Array:
    """Return a parameter as an array that is whole, gathered in `dtype`; `sums` as for `open`."""
    layout = find_layout()
    if not is_sharded(value):
        return jnp.asarray(value)
    if layout is None:
        whole: jax.Array = value.whole()
        return whole
    piece = _open(value, layout, sums).astype(dtype)
    gathered: jax.Array = gather_opened(piece, value.cut, layout)
    return gathered


@dataclasses.dataclass(frozen=True)
class StackedRows:
    """The parameters of stacked layers, as arrays that a scan may go over.

    Attributes:
        arrays: `[layers, ...]` each: of a sharded parameter, the pieces of this replica.
        make_layer: Makes a layer of one row of each array, gathered.
    """

    arrays: list[Any]
    make_layer: Callable[[Sequence[Any]], Any]

    @classmethod
    def open(cls, layers: nnx.Module, dtype: Any = None, sums: Any = None) -> Self:
        """Open the parameters of `layers`. See Note [Gathering inside of a scan].

        Args:
            layers: Stacked layers.
            dtype: In which matrices are gathered; None keeps theirs.
            sums: In which gradients are summed between slices; None keeps theirs.
        """
        layout = find_layout()
        graphdef, state = nnx.split(layers)
        leaves, treedef = jax.tree.flatten(state, is_leaf=is_sharded)
        cuts = [_find_cut(x, layout) for x in leaves]
        arrays = [_open(x, layout, sums) for x in leaves]

        def make_layer(rows: Sequence[Any]) -> Any:
            whole = [
                row if cut is None or layout is None else _gather(row, cut, layout, dtype)
                for row, cut in zip(rows, cuts, strict=True)
            ]
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, whole))

        return cls(arrays, make_layer)


def find_layout() -> ReplicaMesh | None:
    """Return the mesh of the step that is being traced, or None outside of a step."""
    frame = _replica.current_frame()
    if frame is None or not frame.is_inside_step:
        return None
    layout: ReplicaMesh = frame.strategy.layout
    return layout


def _find_cut(leaf: Any, layout: ReplicaMesh | None) -> Cut | None:
    """Return how a row of a sharded parameter is cut; None if the row is whole."""
    return leaf.cut.before(0) if isinstance(leaf, Sharded) and layout is not None else None


def _open(leaf: Any, layout: ReplicaMesh | None, sums: Any) -> Any:
    if not isinstance(leaf, Sharded):
        return leaf
    if layout is None:
        return leaf.whole()
    held = leaf.held
    if sums is not None and held.dtype != sums and len(held.shape) > 1:
        # Cast before the piece is opened: what adds up its gradients between slices is there.
        leaf = make_undeclared(held.astype(sums), leaf.cut)
    return open_to_gather(leaf, layout)


def _gather(row: Any, cut: Cut, layout: ReplicaMesh, dtype: Any) -> Any:
    if dtype is not None and row.ndim > 1:
        row = row.astype(dtype)
    return gather_opened(row, cut, layout)
