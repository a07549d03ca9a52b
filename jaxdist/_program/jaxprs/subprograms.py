"""The programs inside the operations of a program."""

from collections.abc import Iterator
from typing import Any


def subprograms(eqn: Any) -> list[Any]:
    """The sub-programs of one equation, open or closed."""
    return [program for value in eqn.params.values() for program in programs_in(value)]


def programs_in(value: Any) -> Iterator[Any]:
    """The programs that a parameter is, or holds."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from programs_in(item)
    elif hasattr(getattr(value, "jaxpr", value), "eqns"):
        yield value


def holds_programs(value: Any) -> bool:
    """Whether a parameter of an equation is a sub-program, or some of them."""
    return any(True for _ in programs_in(value))


def inner_inputs(program: Any) -> list[Any]:
    """The input variables of a sub-program."""
    return list(getattr(program, "jaxpr", program).invars)


def contains(jaxpr: Any, name: str) -> bool:
    """Whether an operation of this name is anywhere in a program."""
    return any(
        e.primitive.name == name or any(contains(s, name) for s in subprograms(e))
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )
