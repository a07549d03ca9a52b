"""Checks the arguments of `pipeline_loss`, before JAX traces or flattens them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist import _pipeline
from jaxdist._called import refuse, refuse_type
from jaxdist._validate import check_callable, is_array, refuse_choice, show
from jaxdist.nn._vocabulary_head import VocabularyHead


def check_functions(embed: Any, layer: Any, head: Any, parts: Any) -> None:
    """Check the functions but for the arguments of layer, and that there are three parts."""
    for name, fn in (("embed", embed), ("layer", layer), ("head", head)):
        check_callable(fn, name)
    _check_takes("embed", embed, ("parts[0]", "rows"), "Write def embed(e, rows).")
    _check_takes("head", head, ("parts[2]", "x", "rows"), "Write def head(h, x, rows).")
    if not isinstance(parts, (tuple, list)) or len(parts) != 3:
        raise refuse_type(
            f"parts={show(parts)}.",
            "parts are the parameters of embed, of all layers, and of head.",
            "Pass a tuple of three: parts=(embed, layers, head).",
        )


def check_layer(layer: Callable[..., Any], *, has_keys: bool) -> None:
    """Check that a layer takes keys where the call has a key, and only there."""
    if has_keys:
        remedy = "Write def layer(w, x, keys), or leave key out."
        _check_takes("layer", layer, ("w", "x", "keys"), remedy)
    else:
        remedy = "Write def layer(w, x), or pass key=, the key of the step."
        _check_takes("layer", layer, ("w", "x"), remedy)


def check_options(head: Any, schedule: Any, reduce: Any, *, has_aux: bool) -> None:
    """Check the schedule, and what the head returns."""
    if not isinstance(schedule, str) or schedule not in _pipeline.SCHEDULES:
        raise refuse_choice("schedule", schedule, _pipeline.SCHEDULES)
    if not isinstance(reduce, str) or reduce not in ("mean", "sum"):
        raise refuse_choice("reduce", reduce, ("mean", "sum"))
    if not isinstance(head, VocabularyHead):
        return
    if reduce == "mean" and head.weights is not None:
        raise refuse(
            "reduce='mean', and head=nn.vocabulary_head(..., weights=...), which returns a sum.",
            "A mean of sums depends on the number of micro-batches.",
            "Pass reduce='sum', and divide the loss by the sum of the weights.",
        )
    if has_aux:
        raise refuse(
            "has_aux=True, and head=nn.vocabulary_head(...), which returns the loss only.",
            "With has_aux=True head returns (loss, aux).",
            "Leave has_aux out, or write a head of your own.",
        )


def _check_takes(name: str, fn: Callable[..., Any], given: Sequence[str], remedy: str) -> None:
    """Check that a function of the user takes the arguments with which it is called.

    Python would only name the function, and the call is not in the user's program.

    Args:
        name: The name of the argument.
        fn: The function.
        given: The names of its positional arguments.
        remedy: What to do.
    """
    try:
        # A wrapper may pass other arguments than it gets.
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # A function of C may have none.
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        called = f"{getattr(fn, '__qualname__', 'f')}({', '.join(signature.parameters)})"
        raise refuse_type(
            f"{name}={called}: {error}.",
            f"It is called as {name}({', '.join(given)}).",
            remedy,
        ) from None


def check_leaves(name: str, tree: Any, remedy: str) -> None:
    """Check that each leaf of a tree is an array, or becomes one."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(leaf) and not hasattr(leaf, "__jax_array__"):
            raise refuse_type(
                f"{name}{jax.tree_util.keystr(path)}={show(leaf)}.",
                f"{name} is a pytree of arrays.",
                remedy,
            )
