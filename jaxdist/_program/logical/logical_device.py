"""Marks in a step: the logical device that computes a value, and layouts over these devices."""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxdist import _compat
from jaxdist._collectives import make_mark
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.jaxprs.control_flow import Scan
from jaxdist._program.jaxprs.interpreter import Interpreter
from jaxdist._program.jaxprs.subprograms import open_jaxpr
from jaxdist._program.nnx.closures import find_closure_values
from jaxdist._program.nnx.graph import split_objects
from jaxdist._values import is_nnx_object
from jaxdist.errors import ArgumentTypeError, ContextError


def _transpose(cotangent: Any, *_: Any, device: int, backward: bool) -> list[Any]:
    return [ASSIGN.bind(cotangent, device=device, backward=not backward)]


# A tangent gets the mark of its value. A mark in the forward pass places the operations before it.
# In the backward pass their transposes come after the cotangent of the marked value, so the
# transpose of a mark has `backward=True`, and places the operations after it, up to the next mark.
ASSIGN = make_mark("jaxdist_logical_device", _transpose)


def assigned(array: Any, device: int) -> jax.Array:
    """Return `array` with a mark that places its computation on one logical device.

    Shapes:
        That of `array`.
    """
    return ASSIGN.bind(array, device=device, backward=False)


# The device is part of the function's name, since JAX's transformations keep the name of a jitted
# function for all functions that they derive from it (JVP, transpose, batched).
_NAME = "jaxdist_on_logical_device_"
_NAMED = re.compile(re.escape(_NAME) + r"(\d+)")


def on_device(fn: Callable[..., Any], device: int) -> Callable[..., Any]:
    """Return `fn` as a function that runs on one logical device, together with its derivatives.

    Numbers and arrays among the arguments are traced, and so are variables of NNX objects. The
    caller's NNX objects get the values that `fn` writes to them. Other leaves are static.
    """

    def call_on_device(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_nnx_object)
        traced = [i for i, leaf in enumerate(leaves) if _is_traced(leaf)]
        places = [i for i, leaf in enumerate(leaves) if is_nnx_object(leaf)]
        nodes = tuple(leaves[i] for i in places)
        shape, state = split_objects(nodes, tuple(f"argument {n}" for n in range(len(nodes))))
        written: list[int] = []

        def run_placed(values: Sequence[Any], before: Sequence[Any]) -> Any:
            own = list(leaves)
            own_nodes = shape.merge(before)
            for i, value in zip((*traced, *places), (*values, *own_nodes), strict=True):
                own[i] = value
            own_args, own_kwargs = jax.tree.unflatten(treedef, own)
            results = _check_results(fn, _call(fn, own_args, own_kwargs))
            # Return only variables that `fn` wrote: the others stay on all devices, and need no
            # communication.
            after = shape.leaves_of(own_nodes)
            written[:] = [
                i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x is not y
            ]
            return results, [after[i] for i in written]

        run_placed.__name__ = f"{_NAME}{device}"
        results, news = jax.jit(run_placed)([jnp.asarray(leaves[i]) for i in traced], state)
        if written:
            for i, new in zip(written, news, strict=True):
                state[i] = new
            nnx.update(nodes, jax.tree.unflatten(shape.treedef, state))
        return results

    return call_on_device


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except (TraceContextError, ValueError) as error:
        if "different trace level" not in str(error):
            raise
        reached = find_closure_values(fn).items()
        names = (
            ", ".join(n for n, x in reached if is_nnx_object(x)) or "of a function that it calls"
        )
        raise ContextError(
            f"on_logical_device: {getattr(fn, '__name__', type(fn).__name__)} writes to an NNX "
            f"object that it closes over: {names}.\n\n"
            "The function is a program of its own; only what it writes to its arguments comes "
            "out of it.\n\n"
            "Pass the object to it: strategy.on_logical_device(1)(fn)(model, x)."
        ) from error


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)) and (
        not isinstance(leaf, bool)
    )


def _check_results(fn: Callable[..., Any], results: Any) -> Any:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        is_array = _is_traced(leaf) or isinstance(leaf, bool) or hasattr(leaf, "__jax_array__")
        if not is_array:
            name = getattr(fn, "__name__", type(fn).__name__)
            raise ArgumentTypeError(
                f"TPUStrategy.on_logical_device: result{jax.tree_util.keystr(path)} of {name} is "
                f"of type {type(leaf).__name__}.\n\n"
                "One logical device computes the results, and the others get them as arrays.\n\n"
                "Return arrays, or pytrees of them, and keep other values outside of the function."
            )
    return results


def get_device(eqn: Any) -> int | None:
    """Return the logical device on which `on_device` placed an operation, or None."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    found = _NAMED.fullmatch(eqn.params["name"])
    return None if found is None else int(found.group(1))


# A primitive of jaxdist, for two reasons: JAX's sharding constraint cannot name parts of a mesh
# axis, and `MarkAnalysis` must find the marks of a step in its trace.
LOGICAL_LAYOUT = Primitive("jaxdist_logical_layout")

# In `parts`: the partitioner chooses the layout of a dim that `jax.vmap` maps over.
OPEN = 0


def laid_out(array: Any, parts: Sequence[int], layout: ReplicaMesh) -> jax.Array:
    """Return `array` with a mark that splits each dim into a number of parts.

    The cotangent gets the same layout. If a dim is not divisible by its parts, the partitioner pads
    it and removes the padding afterwards.

    Shapes:
        That of `array`.
    """
    [axis] = layout.logical_axes
    shape = tuple(layout.mesh.shape.items())
    return LOGICAL_LAYOUT.bind(array, parts=tuple(parts), axis=axis, mesh_shape=shape)


def _lower(context: Any, value: Any, *, parts: Any, axis: str, mesh_shape: Any) -> list[Any]:
    return [_compat.constrain_tiles(context, value, parts, axis, mesh_shape)]


def _batch(values: Sequence[Any], dims: Sequence[Any], *, parts: Any, **rest: Any) -> Any:
    [value], [dim] = values, dims
    marked = LOGICAL_LAYOUT.bind(value, parts=(*parts[:dim], OPEN, *parts[dim:]), **rest)
    return marked, dim


LOGICAL_LAYOUT.def_impl(lambda x, **_: x)
LOGICAL_LAYOUT.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(LOGICAL_LAYOUT, _lower)
ad.deflinear2(LOGICAL_LAYOUT, lambda ct, _, **how: [LOGICAL_LAYOUT.bind(ct, **how)])
batching.primitive_batchers[LOGICAL_LAYOUT] = _batch


# The number of parts of each dim; None for a value that is not marked.
Parts: TypeAlias = tuple[int, ...] | None


def marks_of_results(program: Any) -> list[Parts]:
    """Return the marks of the results of an open or closed program.

    A value keeps its mark when a function or a loop returns it.
    """
    return MarkAnalysis().run(program, [None] * len(open_jaxpr(program).invars))


class MarkAnalysis(Interpreter[Parts]):
    """Finds the layout over logical devices that each value is marked with."""

    not_entered = frozenset({"shard_map"})

    def constant(self, variable: Any, value: Any) -> Parts:
        return None

    def operation(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        if eqn.primitive is LOGICAL_LAYOUT:
            return [tuple(max(n, 1) for n in eqn.params["parts"])]
        return [None] * len(eqn.outvars)

    def scan(self, eqn: Any, inputs: list[Parts]) -> list[Parts]:
        loop = Scan.of(eqn.params)
        inside = marks_of_results(loop.program)
        # A scan without iterations returns its initial carry, not the marked one.
        state = [m if loop.length else None for m in inside[: loop.num_carry]]
        return [*state, *(None if m is None else (1, *m) for m in inside[loop.num_carry :])]

    # A mark inside one of these does not determine the layout of the result.
    cond = operation
    while_loop = operation
    linear_solve = operation
