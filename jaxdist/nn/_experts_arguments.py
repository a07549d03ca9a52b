"""Checks the arguments of `experts`, and the results of the function of one expert."""

import fractions
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import keystr

from jaxdist import _replica
from jaxdist._called import refuse, refuse_type
from jaxdist._validate import as_array, as_integer, is_array, show
from jaxdist._values import (
    Assignable,
    PerReplica,
    Sharded,
    Stop,
    gather_whole,
    is_assignable,
    is_sharded,
    stops,
    whole_array,
)
from jaxdist.errors import ShapeError
from jaxdist.nn._axis import Axis


def as_tokens(x: Any) -> jax.Array:
    """Check that `x` has tokens of floating-point numbers, and return it as an array."""
    array = as_array("x", _gather_leaf("x", x))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise refuse_type(
            f"x of the dtype {array.dtype}.",
            "x has tokens of floating-point numbers, for which experts are chosen.",
            "Pass the result of an embedding or of a layer; x.astype(jnp.float32) if these are "
            "features.",
        )
    if array.ndim < 2:
        raise refuse(
            f"x of the shape {list(array.shape)}.",
            "x is [rows, tokens, d], or [tokens, d] for one row.",
            f"Pass an array with {2 - array.ndim} more dim(s), such as x[None].",
            kind=ShapeError,
        )
    return array


def as_router(router: Any, x: jax.Array) -> jax.Array:
    """Check that `router` has a column for each expert, and return it as an array."""
    array = as_array("router", _gather_leaf("router", router))
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise refuse_type(
            f"router of the dtype {array.dtype}.",
            "router is a matrix of floating-point numbers, [d, experts].",
            "Pass a parameter, such as jax.random.normal(key, (d, experts)).",
        )
    width = x.shape[-1]
    if array.ndim != 2 or array.shape[0] != width:
        is_turned = array.ndim == 2 and array.shape[1] == width
        raise refuse(
            f"router of the shape {list(array.shape)}, and x of the shape {list(x.shape)}.",
            f"router is a matrix [d, experts], and d of x is {width}.",
            "Pass router.T." if is_turned else f"Pass a matrix of the shape [{width}, experts].",
            kind=ShapeError,
        )
    return array


def as_logits(router: Callable[[jax.Array], Any], x: jax.Array) -> jax.Array:
    """Return what a function returns for the tokens, with a number for each expert."""
    rule = "router(x) returns logits of floating-point numbers, [..., tokens, experts]."
    result = router(x)
    if not is_array(result) or not jnp.issubdtype(jnp.result_type(result), jnp.floating):
        raise refuse_type(
            f"router, which returned {show(result)}.",
            rule,
            "Return one array, such as x @ kernel + bias.",
        )
    array = jnp.asarray(result)
    if array.shape[:-1] != x.shape[:-1] or array.ndim != x.ndim:
        raise refuse(
            f"router, which returned {list(array.shape)} for x of the shape {list(x.shape)}.",
            rule,
            f"Return logits of the shape {[*x.shape[:-1], 'experts']}.".replace("'", ""),
            kind=ShapeError,
        )
    return array


def as_weights(weights: Any, experts: int) -> Any:
    """Check that each leaf has the weights of all experts, and return a pytree of arrays.

    Parameters in pieces are gathered.
    """
    whole = map_weights(lambda _, x: _gather_leaf("weights", x), weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
        check_leaf(f"weights{keystr(path)}", leaf, experts)
    return jax.tree.map(jnp.asarray, whole)


def map_weights(fn: Callable[[str, Any], Any], weights: Any) -> Any:
    """Call a function with the name and the value of each leaf; an array in pieces is one leaf.

    Objects of NNX are copied, so that those of the user stay as they are.
    """

    def on_node(path: Any, x: Any) -> Any:
        name = f"weights{keystr(path)}"
        if not isinstance(x, nnx.Pytree):
            return fn(name, x)
        graphdef, state = nnx.split(x)
        changed = jax.tree_util.tree_map_with_path(
            lambda inner, x: fn(name + keystr(inner), x), state, is_leaf=is_sharded
        )
        return nnx.merge(graphdef, changed)

    is_node = stops(Stop.GATHERED, Assignable)
    return jax.tree_util.tree_map_with_path(on_node, weights, is_leaf=is_node)


def check_has_weights(weights: Any, experts: int) -> None:
    """Check that the pytree has a leaf."""
    if not jax.tree.leaves(weights):
        raise refuse_type(
            f"weights={show(weights)}, in which is no array.",
            "weights is a pytree of arrays [experts, ...]: a row of each for each expert.",
            f"Pass for instance weights={{'w': jnp.ones(({experts}, d, d))}}.",
        )


def check_leaf(name: str, leaf: Any, experts: int) -> None:
    """Check that a leaf is an array with a row for each expert."""
    if not is_array(leaf):
        raise refuse_type(
            f"{name}={show(leaf)}.",
            "Each leaf of weights is an array [experts, ...].",
            "Pass it as a constant of the function expert.",
        )
    shape = jnp.shape(leaf)
    if not shape or shape[0] != experts:
        raise refuse(
            f"{name} of the shape {list(shape)}, and router with {experts} columns, one for "
            "each expert.",
            "Dim 0 of each leaf of weights is the number of the expert.",
            _explain_leaf(shape, experts),
            kind=ShapeError,
        )


def _explain_leaf(shape: tuple[int, ...], experts: int) -> str:
    if experts in shape:
        return (
            f"Pass it with dim {shape.index(experts)} first: jnp.moveaxis(leaf, "
            f"{shape.index(experts)}, 0)."
        )
    more = f"Or pass a router with {shape[0]} columns." if shape else ""
    return f"Stack the weights of {experts} experts along dim 0. {more}".strip()


def _gather_leaf(name: str, x: Any) -> Any:
    if isinstance(x, nnx.Variable):
        x = x.get_raw_value()
    if isinstance(x, PerReplica):
        raise refuse_type(
            f"{name} with {show(x)}.",
            "It takes arrays of one replica, and a PerReplica has a value for each replica.",
            "Pass it to the step in the args of strategy.run, where each replica gets its own "
            "value.",
        )
    if is_assignable(x):
        return jnp.asarray(x)
    frame = _replica.current_frame()
    # A step may also close over a concrete `Sharded`, which holds the whole array.
    if isinstance(x, Sharded) and isinstance(x.held, jax.core.Tracer) and frame is not None:
        return gather_whole(x, frame.strategy.layout) if frame.is_inside_step else x.whole()
    return whole_array(x)


def as_top_k(top_k: Any, experts: int) -> int:
    """Check the number of choices of each token, and return it."""
    most = f"Pass top_k from 1 to {experts}." if experts else "Pass a router [d, experts]."
    number = as_integer("top_k", top_k, least=1, example=2, remedy=most)
    if number > experts:
        raise refuse(
            f"top_k={number}, and router with {experts} columns, one for each expert.",
            "Each token chooses top_k different experts.",
            most,
        )
    return number


def as_capacity(capacity: Any, *, top_k: int, tokens: int, experts: int) -> int:
    """Return the number of tokens of a group that an expert takes."""
    if capacity is None:
        return tokens
    rule = "capacity is a finite number above 0, or None, which drops no token."
    way = "Pass for instance capacity=1.25: room for a quarter more than an equal share."
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Real):
        raise refuse_type(f"capacity={show(capacity)}.", rule, way)
    if not math.isfinite(capacity) or capacity <= 0:
        raise refuse(f"capacity={capacity!r}.", rule, way)
    # 1.1 * 80 / 8 is 11, and in floats a little more: so it is computed with the decimal number.
    exact = fractions.Fraction(str(capacity)) * top_k * tokens / experts
    return min(tokens, math.ceil(exact))


def as_group(group: Any, x: jax.Array) -> int:
    """Return the number of tokens of a group: those of a row by default."""
    tokens = x.shape[-2]
    if group is None:
        _check_has_rows(x)
        return tokens
    size = as_integer("group", group, least=1, example=tokens or 1)
    if tokens % size:
        near = _find_nearest(size, [n for n in range(1, tokens + 1) if not tokens % n])
        raise refuse(
            f"group={size}, and x of the shape {list(x.shape)}, with {tokens} tokens in a row.",
            "A row is divided into groups of equal size, and no group has tokens of two rows.",
            f"Pass group={near}.",
            kind=ShapeError,
        )
    return size


def _find_nearest(wanted: int, sizes: list[int]) -> str:
    """Return the next smaller and the next larger one of `sizes`."""
    below = [n for n in sizes if n < wanted][-1:]
    above = [n for n in sizes if n > wanted][:1]
    return " or ".join(map(str, below + above))


def _check_has_rows(x: jax.Array) -> None:
    """Raise if all tokens of this replica would be one group, whose size depends on the layout."""
    frame = _replica.current_frame()
    if x.ndim > 2 or frame is None or not frame.is_inside_step:
        return
    count = frame.strategy.layout.num_replicas
    if count == 1:
        return
    tokens = x.shape[0]
    raise refuse(
        f"x of the shape {list(x.shape)}, without rows and without group, on {count} replicas.",
        "A group has the same tokens on each number of replicas, or other tokens would be "
        "dropped. The default is a row of x, [rows, tokens, d].",
        f"Pass group={tokens} if these tokens are one row, or another divisor of {tokens}.",
        kind=ShapeError,
    )


def check_experts(experts: int, axis: Axis | None) -> None:
    """Check that each device or replica of the axis has the same number of experts."""
    if axis is None or not experts % axis.size:
        return
    below = experts // axis.size * axis.size
    near = " or ".join(str(n) for n in (below, below + axis.size) if n)
    sizes = [n for n in range(1, experts + 1) if not experts % n]
    what = "replica" if axis.is_of_replicas else "device"
    shown = " or ".join(map(str, sizes[1:5] or sizes))
    raise refuse(
        f"router with {experts} columns, one for each expert, and the axis {axis.name!r} of "
        f"{axis.size} {what}s.",
        f"Each {what} of the axis has the same number of experts.",
        f"Use {near} experts, or an axis of {shown} {what}{'s' * (experts > 1)}.",
        kind=ShapeError,
    )


def check_result(expert: Callable[[Any, jax.Array], Any]) -> Callable[[Any, jax.Array], jax.Array]:
    """Return `expert` with a check that its result is an array like its rows."""

    def call(w: Any, rows: jax.Array) -> jax.Array:
        result = expert(w, rows)
        if not is_array(result):
            raise refuse_type(
                f"expert, which returned {show(result)}.",
                "expert(weights, rows) returns an array like its rows.",
                "Return one array; compute other results from y.",
            )
        found = jnp.asarray(result)
        if found.shape == rows.shape and found.dtype == rows.dtype:
            return found
        is_shape = found.shape != rows.shape
        width = rows.shape[-1]
        raise refuse(
            f"expert, which returned {found.dtype}{list(found.shape)} for rows "
            f"{rows.dtype}{list(rows.shape)}.",
            "expert(weights, rows) returns an array of the shape and dtype of its rows, which are "
            "those of y and of what devices send.",
            f"Let its last layer return {width} columns, one result for each row."
            if is_shape
            else f"Return result.astype(rows.dtype), or convert x to {found.dtype} before.",
            kind=ShapeError,
        )

    return call
