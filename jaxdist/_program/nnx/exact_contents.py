"""Keys for what NNX objects hold beside their variables, including dicts and lists."""

from typing import Any

from jaxdist._program.arguments.exact import exact
from jaxdist.errors import ArgumentTypeError


def exact_graph(graphdef: Any) -> Any:
    """Return the key of the static part of NNX objects, whose lists cannot be hashed.

    Raises:
        ArgumentTypeError: An attribute, or something in it, cannot be hashed.
    """
    # Flax stores static attributes with a `value`; other attributes are only markers, which are
    # compared themselves.
    attributes = (
        (exact(name), exact_contents(getattr(mark, "value", mark), f"The attribute {name!r}"))
        for name, mark in graphdef.attributes
    )
    return tuple(map(exact, graphdef.nodes)), tuple(attributes)


def exact_contents(value: Any, name: str) -> Any:
    """Return a key like `exact`, also for dicts, lists and sets. A changed container has another.

    Args:
        value: A number, a string, a container, or any hashable object.
        name: The name of the value in error messages.

    Raises:
        ArgumentTypeError: The value, or something in it, cannot be hashed.
    """
    kind = type(value)
    if isinstance(value, dict):
        items = value.items()
        return kind, tuple((exact(k), exact_contents(v, f"{name}[{k!r}]")) for k, v in items)
    if kind in (list, tuple):
        return kind, tuple(exact_contents(v, f"{name}[{i}]") for i, v in enumerate(value))
    if kind in (set, frozenset):
        return kind, frozenset(exact_contents(v, name) for v in value)
    key = exact(value)
    try:
        hash(key)
    except TypeError:
        raise ArgumentTypeError(_not_hashable(value, name)) from None
    return key


def _not_hashable(value: Any, name: str) -> str:
    return (
        f"{name} is {value!r}, of type {type(value).__name__}, which cannot be hashed.\n\n"
        "What an NNX object holds beside its variables is part of the program, so it must be "
        "told apart from other values.\n\n"
        "Use numbers, strings, tuples, lists, dicts, or a class with __hash__ and __eq__ "
        "(@dataclass(frozen=True)); put arrays into nnx.Variable."
    )
