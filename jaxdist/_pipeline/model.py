"""A model as functions of lists of arrays, checked before anything runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxdist import _compat
from jaxdist._called import refuse
from jaxdist._collectives import find_uses, walk_operations
from jaxdist._pipeline.inputs import (
    Inputs,
    Leaves,
    StageFns,
    can_have_gradient,
    take_one,
)
from jaxdist._pipeline.vocabulary import split_over
from jaxdist._values import GATHERED, wide_dtype
from jaxdist.errors import ShapeError


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
        has_permutes: Whether a function calls `jax.lax.ppermute`, over any axis.
        aux_tree: The structure of what the head returns beside the loss.
        aux_avals: The shapes and dtypes of its leaves; none if it returns the loss only.
        head_axis: The axis over which the head is split, or None for a head on one device.
    """

    fns: StageFns
    inputs: Inputs
    x_tree: Any
    x_avals: list[Any]
    has_losses: bool
    loss_dtype: Any
    has_permutes: bool
    aux_tree: Any
    aux_avals: list[Any]
    head_axis: str | None = None

    @property
    def x_floats(self) -> list[bool]:
        """Which leaves of `x` have gradients; the others, such as masks, are only passed on."""
        return [can_have_gradient(aval.dtype) for aval in self.x_avals]

    def embed(self, e: Leaves, shared: Leaves, rows: Leaves) -> Leaves:
        """Return the input of the first layer."""
        trees = self.inputs.trees
        with jax.named_scope("pipeline_embed"):
            return _strong(
                self._call(
                    self.fns.embed, shared, trees.embed.unflatten(e), trees.rows.unflatten(rows)
                )
            )

    def run_layers(
        self, w: Leaves, shared: Leaves, x: Leaves, keys: Leaves, first: Any
    ) -> tuple[Leaves, Any]:
        """Return the output of consecutive layers, and the sum of their own losses.

        Args:
            w: Stacks of the layers' parameters.
            shared: Arrays that all layers use.
            x: The input of the first of them.
            keys: At most one array: a key for each row.
            first: The number of the first of these layers in the model.
        """
        numbers = first + jnp.arange(w[0].shape[0])

        def run_layer(carry: Any, of_layer: Any) -> Any:
            x, total = carry
            w, number = of_layer
            y, loss = self._run_layer(w, shared, number, x, keys)
            return (y, total if loss is None else total + loss.astype(total.dtype)), None

        # Without losses the sum has no place in the loop, where a gradient would carry it.
        start = x, jnp.zeros((), self.loss_dtype) if self.has_losses else None
        (x, total), _ = jax.lax.scan(run_layer, start, (w, numbers))
        return x, total

    def _run_layer(
        self, w: Leaves, shared: Leaves, number: Any, x: Leaves, keys: Leaves
    ) -> tuple[Leaves, Any]:
        # By the row and the layer only, so that dropout is equal on all layouts.
        of_layer = jax.vmap(jax.random.fold_in, (0, None))(keys[0], number) if keys else None
        w_tree = self.inputs.trees.layers
        result = self._call(
            self.fns.layer, shared, w_tree.unflatten(w), self.x_tree.unflatten(x), of_layer
        )
        if self.has_losses:
            result, loss = result
            return _strong(result), loss
        return _strong(result), None

    def head(self, h: Leaves, shared: Leaves, x: Leaves, rows: Leaves) -> tuple[Any, Leaves]:
        """Return the loss, at least as float32, and what the head returns beside it."""
        trees = self.inputs.trees
        of_head = trees.head.unflatten(h), self.x_tree.unflatten(x), trees.rows.unflatten(rows)
        with jax.named_scope("pipeline_head"), split_over(self.head_axis):
            result = self._call(self.fns.head, shared, *of_head)
        loss, aux = result if self.aux_avals else (result, ())
        return jnp.asarray(loss).astype(self.loss_dtype), _strong(aux)

    def join(self, loss: Any, aux: Leaves) -> Any:
        """Return the loss, with what the head returns beside it if it does."""
        return (loss, self.aux_tree.unflatten(aux)) if self.aux_avals else loss

    def _call(self, fn: Callable[..., Any], shared: Leaves, *args: Any) -> Any:
        """Call a function of the user, with other values for the arrays around it."""
        if not shared:
            return fn(*args)
        # JAX names such an array by the object that the function uses, the same in each trace.
        own = self.inputs.shared
        values = {id(old): new for old, new in zip(own, shared, strict=True)}
        with _compat.typed_like(own, shared):
            program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        closed = ClosedJaxpr(program.jaxpr, [values.get(id(c), c) for c in program.consts])
        found = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)


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
    has_aux: bool = False,
) -> Model:
    """Trace the functions for one micro-batch and one layer, and check what they return.

    Args:
        fns: The functions of the user.
        inputs: The structures of the arguments of the loss.
        leaves: Its leaves on this device.
        axis: The axis of the stages, over which the functions must not communicate.
        has_split_head: Whether all stages run the head together, each with its part.
        has_aux: Whether the head returns arrays with a row for each example beside the loss.

    Raises:
        ShapeError: A layer changes the structure, a shape or a dtype of `x`, a loss is not a
            scalar, or an array beside it has not a row for each example.
        ArgumentError: A function communicates over `axis`, gathers an array in pieces, or assigns a
            variable.
    """
    with _compat.typed_like(inputs.shared, inputs.take_apart(leaves).shared):
        return _check_model(
            StageFns(*fns), inputs, leaves, axis, has_split_head=has_split_head, has_aux=has_aux
        )


def _check_model(
    fns: StageFns,
    inputs: Inputs,
    leaves: Leaves,
    axis: str | None,
    *,
    has_split_head: bool,
    has_aux: bool,
) -> Model:
    of_embed, of_layer, of_head, one, of_rows = take_one(
        inputs.trees, inputs.take_apart(leaves), inputs.chunks
    )
    embed, x = _trace(fns.embed, of_embed, one)
    _check_uses(embed, fns.embed, "embed", axis)
    layer, result = _trace(fns.layer, of_layer, x, of_rows)
    _check_uses(layer, fns.layer, "layer", axis)
    x_avals, x_tree = jax.tree.flatten(x)
    has_losses = _has_loss(result, x_tree)
    if has_losses:
        result, loss = result
        _check_scalar("layer", fns.layer, loss)
    _check_x(fns.layer, x, result)
    head_axis = axis if has_split_head else None
    with split_over(head_axis):
        head, result = _trace(fns.head, of_head, x, one)
    _check_uses(head, fns.head, "head", None if has_split_head else axis)
    loss, aux = _read_aux(fns.head, result, inputs) if has_aux else (result, ())
    _check_scalar("head", fns.head, loss)
    aux_avals, aux_tree = jax.tree.flatten(aux)
    programs = embed, layer, head
    names = {eqn.primitive.name for program in programs for eqn in walk_operations(program)}
    return Model(
        fns=fns,
        inputs=inputs,
        x_tree=x_tree,
        x_avals=x_avals,
        has_losses=has_losses,
        loss_dtype=wide_dtype(loss.dtype),
        has_permutes="ppermute" in names,
        aux_tree=aux_tree,
        aux_avals=aux_avals,
        head_axis=head_axis,
    )


def _read_aux(head: Callable[..., Any], result: Any, inputs: Inputs) -> tuple[Any, Any]:
    """Return the loss and what is beside it: arrays with a row for each example."""
    if not isinstance(result, tuple) or len(result) != 2 or not jax.tree.leaves(result[1]):
        raise refuse(
            f"has_aux=True, and a head ({_name(head)}) that returns {_show(result)}.",
            "With has_aux=True a head returns a pair: the loss, and arrays with a row for each "
            "example.",
            "Return (loss, aux), or leave has_aux out.",
        )
    rows = inputs.take_apart(inputs.leaves).rows[0].shape[1]
    for path, aval in jax.tree_util.tree_leaves_with_path(result[1]):
        is_number = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == bool
        if is_number and aval.shape[:1] == (rows,):
            continue
        raise refuse(
            f"a head ({_name(head)}) with aux{jax.tree_util.keystr(path)} {_show(aval)}, for "
            f"{rows} rows of a micro-batch.",
            "aux has numbers for each example, so that they do not depend on micro-batches: dim 0 "
            "is over the rows.",
            "Return them before their mean or sum over the rows.",
            kind=ShapeError,
        )
    return result


def _trace(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return the program of a function, and the shapes and dtypes of its result."""
    program, result = jax.make_jaxpr(fn, return_shape=True)(*args)
    return program.jaxpr, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), result)


def _check_uses(jaxpr: Any, fn: Callable[..., Any], what: str, axis: str | None) -> None:
    """Check that a function assigns nothing; with an axis of stages, what it must not do there."""
    if any(_compat.is_ref(v) and _compat.has_write_to(jaxpr, v) for v in jaxpr.constvars):
        raise refuse(
            f"{_article(what)} ({_name(fn)}) that assigns a variable.",
            "Stages run the micro-batches in another order than one device, and may run a function "
            "more often. So the functions change nothing.",
            "Assign the variable after the call; what layers compute for it is a part of x.",
        )
    if axis is None:
        return
    if any(eqn.params.get("name") == GATHERED for eqn in walk_operations(jaxpr)):
        raise refuse(
            f"{_article(what)} ({_name(fn)}) that gathers an array in pieces from the code around "
            "it.",
            "It would be gathered, and its gradient scattered, for each micro-batch.",
            "Gather it before the call: table = partition.gather(params['table']), and use table "
            "in the function; or pass it in parts.",
        )
    for name, _ in find_uses(jaxpr, (axis,)):
        raise refuse(
            f"{_article(what)} ({_name(fn)}) that calls {name} over the axis {axis!r}.",
            "Stages run different operations at the same time. So not all of them would take part, "
            "and the others would wait forever.",
            f"Communicate in {what} over other axes of the mesh only; results that another stage "
            "needs are part of x.",
        )


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
