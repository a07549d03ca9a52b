"""The programs inside the operations of a program."""

from typing import Any

PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "cond_jaxpr", "body_jaxpr", "branches")


def subprograms(eqn: Any) -> list[Any]:
    """The sub-programs of one equation, open or closed."""
    found: list[Any] = []
    for key in PARAMETERS:
        value = eqn.params.get(key)
        values = value if isinstance(value, tuple) else (value,)
        found += [v for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]
    return found


def contains(jaxpr: Any, name: str) -> bool:
    """Whether an operation of this name is anywhere in a program."""
    return any(
        e.primitive.name == name or any(contains(s, name) for s in subprograms(e))
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )
