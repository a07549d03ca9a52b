"""Finds the operations of a traced program that communicate over an axis."""

from collections.abc import Iterator
from typing import Any


def find_uses(jaxpr: Any, axes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Return the operations over one of the axes, with the axis, in a program and those inside it.

    The position on an axis (`axis_index`) counts as such an operation.
    """
    for eqn in walk_operations(jaxpr):
        for key in ("axes", "axis_name"):
            named = eqn.params.get(key, ())
            names = named if isinstance(named, (tuple, list)) else (named,)
            yield from ((eqn.primitive.name, axis) for axis in axes if axis in names)


def walk_operations(jaxpr: Any) -> Iterator[Any]:
    """Return all operations of a program and of the programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk_operations(inner)
