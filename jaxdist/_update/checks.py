"""Checks of the arguments of `sharded_update` and `compressed_update`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from jaxdist._called import call_as, called, name_call, refuse, refuse_type
from jaxdist._mesh import ReplicaMesh
from jaxdist._typing import PyTree
from jaxdist._update.leaves import Leaves, is_array
from jaxdist._validate import as_array, format_lines, show
from jaxdist._validate import is_array as is_jax_array
from jaxdist._values import Sharded, from_state, is_per_replica, is_sharded_leaf
from jaxdist.errors import ArgumentError, ContextError, JaxdistError, ShapeError

_MOST_LISTED = 10


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Check `tx`, and return it as a transformation that takes extra arguments."""
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise refuse_type(
            f"tx={show(tx)}.",
            "tx is an optax.GradientTransformation.",
            "Pass for instance optax.adam(1e-3), or make one of two functions: "
            "optax.GradientTransformation(init, update).",
        )
    return optax.with_extra_args_support(tx)


def check_real_replicas(layout: ReplicaMesh, why: str) -> None:
    """Check that replicas are not virtual; `why` explains why results would depend on devices."""
    if layout.num_virtual is not None:
        raise ArgumentError(
            f"{name_call()} was used with a strategy with deterministic=True.\n\n{why}\n\n"
            "Make the strategy without deterministic, or use tx itself on all-reduced gradients."
        )


def check_gradients(grads: PyTree, params: PyTree, name: str = "updates") -> None:
    """Check that the gradients have the structure and shapes of the parameters.

    The error names all leaves that do not fit.
    """
    if params is None:
        return
    # `optax.lookahead` takes gradients of the fast parameters only.
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    lines = _differences(grads, params, "the parameter", name)
    if lines:
        raise _do_not_fit_error(lines, "params", name)


@called("sharded_update")
def explain_gradients(
    error: Exception, grads: PyTree, state: PyTree, params: PyTree, name: str
) -> None:
    """Raise a better error for an update without parameters, if the cause can be found."""
    # With parameters, `check_gradients` has already compared the gradients with them.
    if params is not None:
        return
    for part in _parts_like(state, grads):
        lines = _differences(grads, part, "in the state", name)
        if lines:
            raise _do_not_fit_error(lines, "the state", name) from error
    if "params" in str(error):
        raise ArgumentError(
            f"sharded_update: {_METHODS[name]} was called without params, and the transformation "
            f"failed: {error}\n\nThis transformation needs the parameters.\n\n"
            "Pass them: tx.update(grads, state, params)."
        ) from error


# The errors that transformations raise for a state or gradients with an unexpected structure.
OF_WRONG_TREES = (TypeError, ValueError, AttributeError, IndexError, KeyError)


@called(lambda name: f"sharded_update: {_METHODS[name]}")
def explain_state(
    error: Exception, init: Callable[[PyTree], PyTree], state: Any, like: Any, name: str
) -> None:
    """Raise a better error if the transformation did not make the state."""
    if isinstance(error, JaxdistError):
        return
    # This only looks for a better message. If `init` fails too, the first error is the better one.
    try:
        wanted = jax.tree.structure(jax.eval_shape(init, like))
    except Exception:
        return
    found = jax.tree.structure(state, is_leaf=is_sharded_leaf)
    if found != wanted:
        raise refuse(
            f"a state with the structure {_shorten(found)}, and the transformation makes "
            f"{_shorten(wanted)}.",
            "The state belongs to the transformation and the parameters that it was made for.",
            "Pass what tx.init(params), or the previous update, returned.",
        ) from error


def _shorten(structure: Any) -> str:
    text = str(structure)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


_MOST_SHOWN = 300
# The name of the gradients in each of the two methods, and the method.
_METHODS = {"updates": "update", "grads": "apply_gradients"}


def _parts_like(state: PyTree, grads: PyTree) -> list[PyTree]:
    """Return the parts of a state that have the structure of the gradients."""
    structure = jax.tree.structure(grads)
    # A single array has the structure of every leaf, so the structure identifies no part.
    if structure == jax.tree.structure(0):
        return []

    def is_like(x: Any) -> bool:
        return jax.tree.structure(x, is_leaf=is_sharded_leaf) == structure

    return [x for x in jax.tree.leaves(state, is_leaf=is_like) if is_like(x)]


def _differences(grads: PyTree, others: PyTree, what: str, name: str) -> list[str]:
    found, wanted = _by_path(grads), _by_path(others)
    return [
        f"{name}{path}: {_describe(found.get(path))}, {what} {_describe(wanted.get(path))}"
        for path in dict.fromkeys([*found, *wanted])
        if _is_different(found.get(path), wanted.get(path))
    ]


def _do_not_fit_error(lines: list[str], what: str, name: str) -> ShapeError:
    return call_as(
        f"{name_call()}: {_METHODS[name]}",
        refuse,
        f"{len(lines)} gradient(s) in {name} that do not fit {what}.\n{format_lines(lines)}",
        "Gradients have the structure and the shapes of the parameters that the state was made "
        "for.",
        "Gradients per example are clipped and averaged over the examples first; those of a part "
        "of the parameters need optax.masked or optax.partition.",
        kind=ShapeError,
    )


def _by_path(tree: PyTree) -> dict[str, tuple[Any, list[int]]]:
    """Return dtype and shape of each array, by its path."""
    flat = tree_flatten_with_path(tree, is_leaf=is_sharded_leaf)[0]
    return {
        keystr(path): (
            x.dtype if hasattr(x, "dtype") else jnp.result_type(x),
            list(getattr(x, "shape", ())),
        )
        for path, x in flat
        if is_array(x)
    }


def _is_different(grad: Any, param: Any) -> bool:
    if grad is None or param is None:
        return True
    # Gradients may have another float dtype than the parameter, but not ints for floats.
    kinds = {jnp.issubdtype(dtype, jnp.floating) for dtype, _ in (grad, param)}
    return grad[1] != param[1] or len(kinds) == 2


def _describe(found: Any) -> str:
    return "nothing" if found is None else f"{found[0]}{found[1]}"


def check_arrays(name: str, tree: PyTree) -> None:
    """Check that every leaf is an array or a number."""
    refuse_per_replica(name, tree)
    for path, leaf in tree_flatten_with_path(tree, is_leaf=is_sharded_leaf)[0]:
        held = from_state(leaf)
        has_dtype = hasattr(held, "dtype") and is_jax_array(held)
        if not has_dtype and not isinstance(held, Sharded):
            as_array(name + keystr(path), held)


def refuse_per_replica(name: str, tree: PyTree) -> None:
    """Raise an error if the pytree contains a `PerReplica`."""
    flat = tree_flatten_with_path(tree, is_leaf=is_per_replica)[0]
    for path, leaf in flat:
        if is_per_replica(leaf):
            raise refuse_type(
                f"{name}{keystr(path)}={show(leaf)}.",
                f"{name} is the same on all replicas.",
                "Pass the arrays of one replica, or what strategy.reduce makes of them.",
            )


def check_pieces(part: Leaves) -> None:
    """Check that the array in each `Sharded` has the shape that the `Sharded` declares."""
    # `jax.tree.map` can put an array of any shape into a pytree node.
    wrong = [
        f"{name}: {list(x.held.shape)} in a node cut along dim {x.dim} of {x.size} elements"
        for x, name in zip(part.arrays, part.names, strict=True)
        if isinstance(x, Sharded)
        and isinstance(x.held, jax.core.Tracer)
        and (x.dim >= x.held.ndim or x.held.shape[x.dim] != x.size)
    ]
    if wrong:
        listed = "\n".join(wrong[:_MOST_LISTED])
        raise ShapeError(
            f"sharded_update: {len(wrong)} array(s) are not what their nodes say.\n{listed}\n\n"
            "A function of pytrees changed the shapes of pieces.\n\n"
            "Gather them before it, jaxdist.partition.gather(tree), or keep the shapes."
        )


def check_whole(state: PyTree) -> None:
    """Check that the state has no `Sharded` arrays, for an update outside of every strategy."""
    leaves = Leaves.flatten(state, "state")
    cut = [n for n, x in zip(leaves.names, leaves.arrays, strict=True) if isinstance(x, Sharded)]
    if cut:
        raise ContextError(
            f"sharded_update: update was called outside every strategy, with a state that is cut "
            f"for replicas: {', '.join(cut[:_MOST_LISTED])}.\n\n"
            "Each replica updates its piece of the state, so the update is part of a step.\n\n"
            "Call it inside a step, strategy.run(step, (params, state, batch)), under the "
            "strategy that the state was made for."
        )
