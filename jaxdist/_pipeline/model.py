"""The functions of a model as functions of lists of arrays, checked before anything runs."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist._called import refuse
from jaxdist._pipeline.vocabulary import split_over
from jaxdist.errors import ShapeError

Leaves = list[Any]


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


class Five(NamedTuple):
    """Something for each of the five parts of the inputs: lists of leaves, or what belongs to them.

    Attributes:
        embed: The parameters of the embedding.
        layers: Those of all layers, as stacks.
        head: Those of the head.
        rows: The batch.
        keys: Random keys, in at most one array.
    """

    embed: Any
    layers: Any
    head: Any
    rows: Any
    keys: Any


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a loss depends on, as one list of leaves, and how to take it apart.

    Attributes:
        leaves: All leaves, in the order of the five parts.
        counts: How many leaves each part has.
        trees: The structures of the parts.
        micro_batches: Number of micro-batches.
        layers: Number of layers.
        chunks: Number of pieces of the model on each stage.
    """

    leaves: Leaves
    counts: Five
    trees: Five
    micro_batches: int
    layers: int
    chunks: int

    def take_apart(self, values: Sequence[Any]) -> Five:
        """Return the lists of the five parts, from one list of all."""
        rest = iter(values)
        return Five(*([next(rest) for _ in range(count)] for count in self.counts))


def read_inputs(parts: Any, batch: Any, keys: Any, chunks: int, stages: int = 1) -> Inputs:
    """Take the arguments of a loss apart, and check their leading dims."""
    parts = tuple(parts)
    if len(parts) != 3:
        raise refuse(
            f"parts with {len(parts)} elements.",
            "parts are the parameters of embed, of all layers, and of head.",
            "Pass (embed, layers, head).",
        )
    flat = [jax.tree.flatten(tree) for tree in (*parts, batch, keys)]
    embed, layers, head, rows, of_keys = ([*map(_as_array, leaves)] for leaves, _ in flat)
    named = jax.tree_util.tree_flatten_with_path(parts[1])[0]
    dims = 1 if chunks == 1 else 2
    stacks = {
        f"parts[1]{jax.tree_util.keystr(path)}": leaf.shape[:dims]
        for (path, _), leaf in zip(named, layers, strict=True)
    }
    shapes = set(stacks.values())
    shape = shapes.pop() if len(shapes) == 1 else ()
    if len(shape) < dims or shape[:-1] != (chunks,)[: dims - 1]:
        shown = ", ".join(f"{name}: {[*found]}" for name, found in stacks.items())
        wanted = "[layers, ...]" if dims == 1 else f"[{chunks}, layers / {chunks}, ...]"
        raise refuse(
            f"layers whose leading dims are {shown or 'those of no array'}.",
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
    sizes = {leaf.shape[:1] for leaf in (*rows, *of_keys)}
    if len(sizes) != 1 or () in sizes or (0,) in sizes:
        raise refuse(
            f"a batch whose leading dims are {sorted(map(list, sizes))}.",
            "Each array of the batch is [micro_batches, rows, ...], with at least one micro-batch.",
            "Split the rows of each array into the same number of micro-batches.",
            kind=ShapeError,
        )
    lists = embed, layers, head, rows, of_keys
    return Inputs(
        [leaf for leaves in lists for leaf in leaves],
        Five(*map(len, lists)),
        Five(*(tree for _, tree in flat)),
        sizes.pop()[0],
        count,
        chunks,
    )


def _as_array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def can_have_gradient(dtype: Any) -> bool:
    """Whether arrays of this dtype have gradients: floats and complex numbers, not keys."""
    return jnp.issubdtype(dtype, jnp.inexact)


def widen(dtype: Any) -> Any:
    """Return the dtype in which gradients and losses of a dtype are summed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def pick(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values whose entry of `mask` is true."""
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def merge(chosen: Sequence[Any], values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return `values` with those that `mask` picks replaced by `chosen`."""
    new = iter(chosen)
    return [next(new) if wanted else value for value, wanted in zip(values, mask, strict=True)]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on lists of leaves, for one micro-batch.

    Attributes:
        fns: The functions of the user.
        inputs: The structures of their arguments.
        x_tree: The structure of `x`.
        x_avals: The shapes and dtypes of its leaves.
        has_losses: Whether layers have losses of their own.
        loss_dtype: The dtype in which losses are summed.
        head_axis: The axis over which the head is split, or None for a head on one device.
    """

    fns: StageFns
    inputs: Inputs
    x_tree: Any
    x_avals: list[Any]
    has_losses: bool
    loss_dtype: Any
    head_axis: str | None = None

    @property
    def x_floats(self) -> list[bool]:
        """Which leaves of `x` have gradients; the others, such as masks, are only passed on."""
        return [can_have_gradient(aval.dtype) for aval in self.x_avals]

    def embed(self, e: Leaves, rows: Leaves) -> Leaves:
        """Return the input of the first layer."""
        trees = self.inputs.trees
        with jax.named_scope("pipeline_embed"):
            return _strong(self.fns.embed(trees.embed.unflatten(e), trees.rows.unflatten(rows)))

    def run_layers(self, w: Leaves, x: Leaves, keys: Leaves, first: Any) -> tuple[Leaves, Any]:
        """Return the output of consecutive layers, and the sum of their own losses.

        Args:
            w: Stacks of the layers' parameters.
            x: The input of the first of them.
            keys: At most one array: a key for each row.
            first: The number of the first of these layers in the model.
        """
        numbers = first + jnp.arange(w[0].shape[0])

        def run_layer(carry: Any, of_layer: Any) -> Any:
            x, total = carry
            w, number = of_layer
            y, loss = self._run_layer(w, number, x, keys)
            return (y, total if loss is None else total + loss.astype(total.dtype)), None

        # Without losses the sum has no place in the loop, where a gradient would carry it.
        start = x, jnp.zeros((), self.loss_dtype) if self.has_losses else None
        (x, total), _ = jax.lax.scan(run_layer, start, (w, numbers))
        return x, total

    def _run_layer(self, w: Leaves, number: Any, x: Leaves, keys: Leaves) -> tuple[Leaves, Any]:
        # By the row and the layer only, so that dropout is equal on all layouts.
        of_layer = jax.vmap(jax.random.fold_in, (0, None))(keys[0], number) if keys else None
        result = self.fns.layer(
            self.inputs.trees.layers.unflatten(w), self.x_tree.unflatten(x), of_layer
        )
        if self.has_losses:
            result, loss = result
            return _strong(result), loss
        return _strong(result), None

    def head(self, h: Leaves, x: Leaves, rows: Leaves) -> Any:
        """Return the loss, at least as float32."""
        trees = self.inputs.trees
        with jax.named_scope("pipeline_head"), split_over(self.head_axis):
            loss = self.fns.head(
                trees.head.unflatten(h), self.x_tree.unflatten(x), trees.rows.unflatten(rows)
            )
        return jnp.asarray(loss).astype(self.loss_dtype)


def _strong(tree: Any) -> Leaves:
    """Return the leaves of a tree without weak types, which a loop over layers would change."""
    return [jnp.asarray(leaf, jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]


def check_model(
    fns: StageFns,
    inputs: Inputs,
    leaves: Leaves,
    *,
    axis: str | None = None,
    has_split_head: bool = False,
) -> Model:
    """Trace the functions for one micro-batch and one layer, and check what they return.

    Args:
        fns: The functions of the user.
        inputs: The structures of the arguments of the loss.
        leaves: Its leaves on this device.
        axis: The axis of the stages, over which the functions must not communicate.
        has_split_head: Whether all stages run the head together, each with its part.

    Raises:
        ShapeError: A layer changes the structure, a shape or a dtype of `x`, or a loss is not a
            scalar.
        ArgumentError: A function communicates over `axis`.
    """
    fns = StageFns(*fns)
    trees, (e, w, h, rows, keys) = inputs.trees, inputs.take_apart(leaves)
    of_embed = trees.embed.unflatten(_avals(e, 0))
    of_layer = trees.layers.unflatten(_avals(w, 1 if inputs.chunks == 1 else 2))
    of_head = trees.head.unflatten(_avals(h, 0))
    one = trees.rows.unflatten(_avals(rows, 1))
    of_rows = _avals(keys, 1)[0] if keys else None

    x_avals, x_tree = jax.tree.flatten(_trace(fns.embed, "embed", axis, of_embed, one))
    x = x_tree.unflatten(x_avals)
    result = _trace(fns.layer, "layer", axis, of_layer, x, of_rows)
    has_losses = _has_loss(result, x_tree)
    if has_losses:
        result, loss = result
        _check_scalar("layer", fns.layer, loss)
    _check_x(fns.layer, x, result)
    head_axis = axis if has_split_head else None
    with split_over(head_axis):
        loss = _trace(fns.head, "head", None if has_split_head else axis, of_head, x, one)
    _check_scalar("head", fns.head, loss)
    return Model(fns, inputs, x_tree, x_avals, has_losses, widen(loss.dtype), head_axis)


def _avals(leaves: Leaves, dims: int) -> Leaves:
    """Return shapes and dtypes without the first dims."""
    return [jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype) for leaf in leaves]


def _trace(fn: Callable[..., Any], what: str, axis: str | None, *args: Any) -> Any:
    """Return the avals of a result, and refuse operations over the axis of the stages."""
    program, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    result = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), result)
    for name in _find_uses(program.jaxpr, axis) if axis else ():
        raise refuse(
            f"{_article(what)} ({_name(fn)}) that calls {name} over the axis {axis!r}.",
            "It is the axis of the stages, which run different operations at the same time: not all "
            "of them would take part in it, and the others would wait forever.",
            f"Communicate in {what} over other axes of the mesh only; results that another stage "
            "needs are part of x.",
        )
    return result


def _find_uses(jaxpr: Any, axis: str) -> Iterator[str]:
    """Return the names of operations over an axis, in a program and the programs inside it."""
    for eqn in jaxpr.eqns:
        for key in ("axes", "axis_name"):
            named = eqn.params.get(key, ())
            if axis in (named if isinstance(named, (tuple, list)) else (named,)):
                yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _find_uses(inner, axis)


def _has_loss(result: Any, x_tree: Any) -> bool:
    """Whether a layer returns `(x, loss)`; a result with the structure of `x` is `x`."""
    if jax.tree.structure(result) == x_tree:
        return False
    return (
        isinstance(result, tuple)
        and len(result) == 2
        and jax.tree.structure(result[0]) == x_tree
        and jax.tree.structure(result[1]) == jax.tree.structure(0)
    )


def _check_x(layer: Callable[..., Any], before: Any, after: Any) -> None:
    shown = _show(before), _show(after)
    if shown[0] == shown[1] and jax.tree.structure(before) == jax.tree.structure(after):
        return
    dtypes = [[a.dtype for a in jax.tree.leaves(tree)] for tree in (before, after)]
    shapes = [[a.shape for a in jax.tree.leaves(tree)] for tree in (before, after)]
    if shapes[0] == shapes[1] and dtypes[0] != dtypes[1]:
        remedy = "Return y.astype(x.dtype) from the layer, or let embed return this dtype."
    else:
        remedy = "Let embed and head change shapes, and keep those of x in the layers."
    raise refuse(
        f"a layer ({_name(layer)}) that makes {shown[1]} of {shown[0]}.",
        "The output of a layer is the input of the next one, so it has the structure, shapes and "
        "dtypes of x.",
        remedy,
        kind=ShapeError,
    )


def _check_scalar(what: str, fn: Callable[..., Any], loss: Any) -> None:
    is_number = isinstance(loss, jax.ShapeDtypeStruct) and not loss.shape
    if is_number and jnp.issubdtype(loss.dtype, jnp.floating):
        return
    raise refuse(
        f"a {what} ({_name(fn)}) with the loss {_show(loss)}.",
        f"The loss of a {what} is one floating-point number.",
        "Return its mean or its sum.",
        kind=ShapeError,
    )


def _show(tree: Any) -> str:
    shown = jax.tree.map(lambda a: f"{a.dtype}{[*a.shape]}", tree)
    return str(shown).replace("'", "")


def _article(what: str) -> str:
    return f"an {what}" if what == "embed" else f"a {what}"


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
