"""Programs of JAX, open or closed, and the programs inside their operations."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal


def open_jaxpr(program: Any) -> Any:
    """Return the open program of an open or closed one; a `Tape` counts as open."""
    return getattr(program, "jaxpr", program)


def get_consts(program: Any) -> Sequence[Any]:
    """Return the constants of a closed program; an open program has none."""
    return getattr(program, "consts", ())


def subprograms(eqn: Any) -> list[Any]:
    """Return the sub-programs of one equation, open or closed."""
    return [program for value in eqn.params.values() for program in iterate_programs(value)]


def iterate_programs(value: Any) -> Iterator[Any]:
    """Return the programs in a parameter, which is a program, a sequence, or something else."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from iterate_programs(item)
    elif hasattr(open_jaxpr(value), "eqns"):
        yield value


def rewrite_programs(value: Any, trace: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """Return a parameter of an equation with each program in it replaced by another one.

    Args:
        value: A program, open or closed, a tuple of programs, or something else.
        trace: Returns the closed replacement for an open program and its constants.
    """
    if not any(True for _ in iterate_programs(value)):
        return value
    if isinstance(value, tuple):
        again = [rewrite_programs(v, trace) for v in value]
        return type(value)(*again) if hasattr(value, "_fields") else tuple(again)
    closed = trace(open_jaxpr(value), get_consts(value))
    return closed if isinstance(value, ClosedJaxpr) else closed.jaxpr


def aval_of(array: Any, num_skipped: int = 0) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array; without its first dims, if some are skipped."""
    aval = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape[num_skipped:], aval.dtype, weak_type=weak)


def trace_again(fn: Callable[..., Any], jaxpr: Any) -> Any:
    """Trace a function for inputs with the shapes and dtypes of an open program's inputs."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(fn)(*avals)


def iterate_equations(program: Any) -> Iterator[Any]:
    """Return the operations of an open or closed program, and of the programs inside it."""
    for eqn in open_jaxpr(program).eqns:
        yield from iterate_with_inner(eqn)


def iterate_with_inner(eqn: Any) -> Iterator[Any]:
    """Return an operation, and the operations of the programs inside it."""
    yield eqn
    for program in subprograms(eqn):
        yield from iterate_equations(program)


def iterate_constants(program: Any) -> Iterator[Any]:
    """Return the constants of a program, and of the programs inside it, literals included."""
    yield from get_consts(program)
    for eqn in iterate_equations(program):
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for inner in subprograms(eqn):
            yield from get_consts(inner)


def contains(program: Any, name: str) -> bool:
    """Whether a program, or a program inside it, has an operation of this name."""
    return any(eqn.primitive.name == name for eqn in iterate_equations(program))
