"""Programs of JAX, open or closed, and the programs inside their operations."""

from collections.abc import Iterator, Sequence
from typing import Any


def open_jaxpr(program: Any) -> Any:
    """Return the open program of an open or closed one; a `Tape` counts as open."""
    return getattr(program, "jaxpr", program)


def get_consts(program: Any) -> Sequence[Any]:
    """Return the constants of a closed program; an open program has none."""
    held: Sequence[Any] = getattr(program, "consts", ())
    return held


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


def has_subprogram(value: Any) -> bool:
    """Whether a parameter of an equation is a sub-program, or a sequence with one."""
    return any(True for _ in iterate_programs(value))


def get_input_variables(program: Any) -> list[Any]:
    """Return the input variables of a sub-program."""
    return list(open_jaxpr(program).invars)


def contains(jaxpr: Any, name: str) -> bool:
    """Whether a program, or a program inside it, has an operation of this name."""
    return any(
        e.primitive.name == name or any(contains(s, name) for s in subprograms(e))
        for e in open_jaxpr(jaxpr).eqns
    )
