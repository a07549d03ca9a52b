"""Checks the functions and the trees of `pipeline_loss`, before JAX traces or flattens them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdist._called import refuse_type
from jaxdist._validate import is_array, show


def check_takes(name: str, fn: Callable[..., Any], given: Sequence[str], remedy: str) -> None:
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
