"""Counts the statements in which a port differs from the program that it comes from."""

import ast
import collections
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Changes(NamedTuple):
    """How many statements a port has that the original has not, and the other way round."""

    new: int
    gone: int


def count_changes(original: Callable[..., Any], port: Callable[..., Any]) -> Changes:
    """Compare the bodies of two functions, with all that is defined in them.

    A statement counts as ruff formats it: a call over several lines is one, and so is the first
    line of a `def` or a loop. One that only moves is not a change. The rest of the original that no
    statement of the port replaces is `gone`.
    """
    before, after = (collections.Counter(_list_statements(fn)) for fn in (original, port))
    new = (after - before).total()
    return Changes(new, max(0, (before - after).total() - new))


def _list_statements(fn: Callable[..., Any]) -> Iterator[str]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(fn))).body
    assert isinstance(tree, ast.FunctionDef)
    for statement in tree.body:
        yield from _list_inside(statement)


def _list_inside(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return  # a docstring
    blocks = [name for name in ("body", "orelse") if getattr(statement, name, [])]
    first_line = copy.copy(statement)
    for name in blocks:
        setattr(first_line, name, [ast.Pass()] if name == "body" else [])
    yield ast.unparse(first_line)
    for name in blocks:
        for inner in getattr(statement, name):
            yield from _list_inside(inner)
