"""The arguments of a loss as one list of leaves, and how they are taken apart."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._called import refuse
from jaxdist.errors import ShapeError

Leaves: TypeAlias = list[Any]


class StageFns(NamedTuple):
    """The three functions of a model.

    Attributes:
        embed: `embed(e, batch) -> x` for one micro-batch.
        layer: `layer(w, x, keys) -> x` for one layer, or `(x, loss)` with a scalar loss of its own.
            `keys` has a random key for each row, or is None.
        head: `head(h, x, batch) -> loss`, a scalar.
    """

    embed: Callable[..., Any]
    layer: Callable[..., Any]
    head: Callable[..., Any]


class Parts(NamedTuple):
    """Something for each part of the inputs: lists of leaves, or what belongs to them.

    Attributes:
        embed: The parameters of the embedding.
        layers: Those of all layers, as stacks.
        head: Those of the head.
        shared: Arrays of functions around the call that the functions of the model use.
        rows: The batch.
        keys: Random keys, in at most one array.
    """

    embed: Any
    layers: Any
    head: Any
    shared: Any
    rows: Any
    keys: Any


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a loss depends on, as one list of leaves, and how to take it apart.

    Attributes:
        leaves: All leaves, in the order of the parts.
        counts: How many leaves each part has.
        trees: The structures of the parts.
        micro_batches: Number of micro-batches.
        chunks: Number of pieces of the model on each stage.
    """

    leaves: Leaves
    counts: Parts
    trees: Parts
    micro_batches: int
    chunks: int

    @property
    def shared(self) -> Leaves:
        """The arrays of functions around the call, which the functions of the model name."""
        return self.take_apart(self.leaves).shared

    def take_apart(self, values: Sequence[Any]) -> Parts:
        """Return the lists of the parts, from one list of all."""
        rest = iter(values)
        return Parts(*([next(rest) for _ in range(count)] for count in self.counts))


def read_inputs(
    fns: StageFns, parts: Any, batch: Any, keys: Any, chunks: int, stages: int = 1
) -> Inputs:
    """Take the arguments of a loss apart, and check their leading dims."""
    parts = tuple(parts)
    if len(parts) != 3:
        raise refuse(
            f"parts with {len(parts)} elements.",
            "parts are the parameters of embed, of all layers, and of head.",
            "Pass (embed, layers, head).",
        )
    flat = [jax.tree.flatten(tree) for tree in (*parts, (), batch, keys)]
    lists = Parts(*([*map(as_array, leaves)] for leaves, _ in flat))
    trees = Parts(*(tree for _, tree in flat))
    named = jax.tree_util.tree_flatten_with_path(parts[1])[0]
    dims = 1 if chunks == 1 else 2
    stacks = {
        f"parts[1]{jax.tree_util.keystr(path)}": leaf.shape[:dims]
        for (path, _), leaf in zip(named, lists.layers, strict=True)
    }
    shapes = set(stacks.values())
    shape = shapes.pop() if len(shapes) == 1 else ()
    if len(shape) < dims or shape[:-1] != (chunks,)[: dims - 1]:
        # A list of layers has many.
        lines = [f"{name}: {[*found]}" for name, found in stacks.items()]
        shown = ", ".join(lines if len(lines) <= 6 else [*lines[:5], "..."])
        wanted = "[layers, ...]" if dims == 1 else f"[{chunks}, layers / {chunks}, ...]"
        raise refuse(
            f"chunks={chunks}, and layers whose leading dims are {shown or 'those of no array'}.",
            f"Each array of the layers is a stack {wanted} of the same number of layers.",
            "Stack the parameters of the layers: jax.tree.map(lambda *a: jnp.stack(a), *layers).",
            kind=ShapeError,
        )
    count, step = math.prod(shape), stages * chunks
    if not count or count % step:
        near = [n for n in (count // step * step, (count // step + 1) * step) if n]
        raise refuse(
            f"{count} layers for {step} pieces: {stages} stages with {chunks} each.",
            "Each piece has as many layers as the others, and at least one.",
            f"Use {' or '.join(map(str, near))} layers.",
            kind=ShapeError,
        )
    sizes = {leaf.shape[:1] for leaf in (*lists.rows, *lists.keys)}
    if len(sizes) != 1 or () in sizes or (0,) in sizes:
        raise refuse(
            f"a batch whose leading dims are {sorted(map(list, sizes))}.",
            "Each array of the batch is [micro_batches, rows, ...], with at least one micro-batch.",
            "Split the rows of each array into the same number of micro-batches.",
            kind=ShapeError,
        )
    lists = lists._replace(shared=_find_shared(StageFns(*fns), trees, lists, chunks))
    return Inputs(
        [leaf for leaves in lists for leaf in leaves],
        Parts(*map(len, lists)),
        trees,
        sizes.pop()[0],
        chunks,
    )


def as_array(leaf: Any) -> Any:
    """Return an array of JAX; a number, or an array of NumPy, becomes one."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def can_have_gradient(dtype: Any) -> bool:
    """Whether arrays of this dtype have gradients: floats and complex numbers, not keys."""
    return jnp.issubdtype(dtype, jnp.inexact)


def pick(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values whose entry of `mask` is true."""
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def merge(chosen: Sequence[Any], values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return `values` with those that `mask` picks replaced by `chosen`."""
    new = iter(chosen)
    return [next(new) if wanted else value for value, wanted in zip(values, mask, strict=True)]


def _find_shared(fns: StageFns, trees: Parts, lists: Parts, chunks: int) -> Leaves:
    """Return the arrays of functions around the call that the functions of the model use.

    They are inputs of the loss like all others: their gradients would be lost else, and JAX does
    not let a function with gradients of its own use them inside a `jax.jit` or a loop. Only traced
    arrays count; others are constants.
    """
    of_embed, of_layer, of_head, one, of_rows = take_one(trees, lists, chunks)
    # What the functions get wrong is found later, with a text.
    try:
        embed, x = jax.make_jaxpr(fns.embed, return_shape=True)(of_embed, one)
        layer = jax.make_jaxpr(fns.layer)(of_layer, x, of_rows)
        head = jax.make_jaxpr(fns.head)(of_head, x, one)
    except NameError:  # an axis that is only there later
        return []
    consts = [*embed.consts, *layer.consts, *head.consts]
    return list({id(c): c for c in consts if _is_traced(c)}.values())


def _is_traced(array: Any) -> bool:
    # A mutable array is no input: it stays what the function around the call has made of it.
    return isinstance(array, jax.core.Tracer) and not _compat.is_mutable(array)


def take_one(trees: Parts, lists: Parts, chunks: int) -> tuple[Any, ...]:
    """Return the shapes and dtypes for one layer and one micro-batch."""
    return (
        trees.embed.unflatten(_avals(lists.embed, 0)),
        trees.layers.unflatten(_avals(lists.layers, 1 if chunks == 1 else 2)),
        trees.head.unflatten(_avals(lists.head, 0)),
        trees.rows.unflatten(_avals(lists.rows, 1)),
        _avals(lists.keys, 1)[0] if lists.keys else None,
    )


def _avals(leaves: Leaves, dims: int) -> Leaves:
    """Return shapes and dtypes without the first dims; a Python number stays one of weak type."""
    return [
        jax.ShapeDtypeStruct(
            leaf.shape[dims:], leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        for leaf in leaves
    ]
