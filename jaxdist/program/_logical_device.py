"""Saying in a step which logical device of the replica computes a value."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist.errors import ArgumentTypeError

# A tangent is marked as the value is. On the way back a mark says of what follows, up to the next
# mark, what on the way there it says of what came before; so its transpose turns it round.
ASSIGN = Primitive("jaxdist_logical_device")


def assigned(array: Any, device: int) -> jax.Array:
    """`array`, marked to be computed on one logical device.

    Shapes:
        As it is.
    """
    marked: jax.Array = ASSIGN.bind(array, device=device, backward=False)
    return marked


def _transposed(cotangent: Any, *_: Any, device: int, backward: bool) -> list[Any]:
    return [ASSIGN.bind(cotangent, device=device, backward=not backward)]


ASSIGN.def_impl(lambda x, **_: x)
ASSIGN.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(ASSIGN, lambda _, x, **__: [x])
ad.deflinear2(ASSIGN, _transposed)
batching.defvectorized(ASSIGN)


# JAX gives the parts that its transformations make of a jitted function the function's name.
_NAME = "jaxdist_on_logical_device_"
_NAMED = re.compile(re.escape(_NAME) + r"(\d+)")


def on_device(fn: Callable[..., Any], device: int) -> Callable[..., Any]:
    """`fn`, to be computed on one logical device, and its derivatives with it.

    Numbers and arrays among the arguments are traced; other leaves are part of the function.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]

        def placed(values: Sequence[Any]) -> Any:
            own = list(leaves)
            for i, value in zip(traced, values, strict=True):
                own[i] = value
            own_args, own_kwargs = jax.tree.unflatten(treedef, own)
            return _checked(fn, fn(*own_args, **own_kwargs))

        placed.__name__ = f"{_NAME}{device}"
        return jax.jit(placed)([jnp.asarray(leaves[i]) for i in traced])

    return called


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and (
        not isinstance(leaf, bool)
    )


def _checked(fn: Callable[..., Any], results: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        is_array = _is_traced(leaf) or isinstance(leaf, bool) or hasattr(leaf, "__jax_array__")
        if not is_array:
            name = getattr(fn, "__name__", type(fn).__name__)
            raise ArgumentTypeError(
                f"TPUStrategy.on_logical_device: result{jax.tree_util.keystr(path)} of {name} is "
                f"of type {type(leaf).__name__}.\n\n"
                "One logical device computes the results, and the others get them as arrays.\n\n"
                "Return arrays, or pytrees of them, and keep what is no array outside of the "
                "function."
            )
    return results


def device_of(eqn: Any) -> int | None:
    """The logical device that an operation was put on by `on_device`."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    found = _NAMED.fullmatch(eqn.params["name"])
    return None if found is None else int(found.group(1))
