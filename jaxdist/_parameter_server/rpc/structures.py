"""Pytrees as JSON: the structure of arguments and results, without their arrays.

A structure is `"*"` for a leaf, None for None, `["list", s, ...]`, `["tuple", s, ...]`, or
`["dict", [key, ...], s, ...]` with sorted keys, which is the order of JAX. Two pytrees have the
same structure if and only if these are equal.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxdist._called import refuse, refuse_type
from jaxdist._typing import PyTree
from jaxdist._validate import show
from jaxdist.errors import ProgramMismatchError

LEAF = "*"
# Fields of a message have at most 64 levels.
_DEEPEST = 50


def flatten(name: str, tree: PyTree) -> tuple[Any, list[tuple[str, Any]]]:
    """Return the structure of a pytree, and its leaves with their names.

    Args:
        name: The pytree, for errors and for the names of the leaves.
        tree: Dicts with texts as keys, lists, tuples and None; everything else is a leaf.

    Raises:
        ArgumentTypeError: A key is no text, or a container is a subclass of dict, list or tuple.
        ArgumentError: It is nested too deeply.

    Example:
        >>> from jaxdist._parameter_server.rpc.structures import flatten
        >>> flatten("args", [1, {"x": 2}])
        (['list', '*', ['dict', ['x'], '*']], [('args[0]', 1), ("args[1]['x']", 2)])
    """
    leaves: list[tuple[str, Any]] = []
    return _flatten(name, tree, leaves, 0), leaves


def _flatten(name: str, tree: Any, leaves: list[tuple[str, Any]], depth: int) -> Any:
    if tree is None:
        return None
    if not isinstance(tree, (dict, list, tuple)):
        leaves.append((name, tree))
        return LEAF
    if depth == _DEEPEST:
        raise refuse(
            f"{name}, which is {depth + 1} levels deep.",
            f"Structures have at most {_DEEPEST} levels.",
            "Pass flatter lists and dicts.",
        )
    # A subclass would arrive as the plain class.
    kind = type(tree)
    if kind is dict and all(type(key) is str and is_sendable(key) for key in tree):
        keys = sorted(tree)
        inner = [_flatten(f"{name}[{key!r}]", tree[key], leaves, depth + 1) for key in keys]
        return ["dict", keys, *inner]
    if kind is list or kind is tuple:
        inner = [
            _flatten(f"{name}[{number}]", item, leaves, depth + 1)
            for number, item in enumerate(tree)
        ]
        return [kind.__name__, *inner]
    raise refuse_type(
        f"{name}={show(tree)}.",
        "What is sent are dicts with texts as keys, lists, tuples and None, with arrays and "
        "numbers in them.",
        "Make a dict or a tuple of it.",
    )


def is_sendable(text: str) -> bool:
    """Whether a text arrives: half of a surrogate pair does not."""
    return text.encode(errors="ignore").decode() == text


def unflatten(structure: Any, leaves: Sequence[Any]) -> PyTree:
    """Return the pytree of a structure that another process has sent.

    Raises:
        ProgramMismatchError: It is no structure, or has another number of leaves.
    """
    given = iter(leaves)
    try:
        tree = _unflatten(structure, given, 0)
        if next(given, LEAF) is not LEAF:
            raise ValueError
    except (ValueError, StopIteration):
        raise ProgramMismatchError(
            f"A message has a structure that is none, with {len(leaves)} array(s).\n\n"
            "A structure is written by jaxdist.\n\n"
            "Install the same version of jaxdist for the server and its clients."
        ) from None
    return tree


def _unflatten(structure: Any, leaves: Iterator[Any], depth: int) -> Any:
    if structure is None:
        return None
    if structure == LEAF:
        return next(leaves)
    if not isinstance(structure, list) or not structure or depth > _DEEPEST:
        raise ValueError
    kind, *inner = structure
    if kind == "dict":
        if not inner or not isinstance(inner[0], list):
            raise ValueError
        keys, *inner = inner
        if len(keys) != len(inner) or not all(isinstance(key, str) for key in keys):
            raise ValueError
        values = [_unflatten(item, leaves, depth + 1) for item in inner]
        return dict(zip(keys, values, strict=True))
    if kind not in ("list", "tuple"):
        raise ValueError
    items = [_unflatten(item, leaves, depth + 1) for item in inner]
    return items if kind == "list" else tuple(items)


class Shown:
    """A leaf in an error: its dtype and shape."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def format_tree(structure: Any, leaves: Sequence[str]) -> str:
    """Return a structure as errors show it, such as `(int32[], {'x': float32[n, 3]})`."""
    text = repr(unflatten(structure, [Shown(leaf) for leaf in leaves]))
    return text if len(text) <= 300 else f"{text[:297]}..."
