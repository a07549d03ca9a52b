"""Keys of what NNX objects hold beside their variables, dicts and lists among it."""

from typing import Any

from jaxdist._program.arguments.exact import exact
from jaxdist.errors import ArgumentTypeError


def exact_graph(graphdef: Any) -> Any:
    """The key of the static part of NNX objects, which holds its parts in lists.

    Raises:
        ArgumentTypeError: An attribute, or something in it, cannot be hashed.
    """
    # An attribute is told by its value where it has one, and is a mark of Flax elsewhere.
    attributes = (
        (exact(name), exact_contents(getattr(mark, "value", mark), f"The attribute {name!r}"))
        for name, mark in graphdef.attributes
    )
    return tuple(map(exact, graphdef.nodes)), tuple(attributes)


def exact_contents(value: Any, name: str) -> Any:
    """`exact`, also of dicts, lists and sets: another key when they were changed.

    Args:
        value: A number, a string, a container, or any object that can be hashed.
        name: What to call it in a message.

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
