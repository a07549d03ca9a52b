"""Lists the small changes that a function allows, each of which the tests should notice."""

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# Larger constants are sizes and times, of which one more is rarely a fault.
_LARGEST = 100
_MOST_LETTERS = 60


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change of a function: `new` instead of `old`, which is a node of its tree."""

    kind: str
    old: ast.stmt | ast.expr
    new: ast.stmt | ast.expr

    def describe(self, first_line: int) -> str:
        """Return the change as text, with its distance from the first line of the function."""
        old, new = _write(self.old), _write(self.new)
        where = f"at line +{self.old.lineno - first_line}"
        if self.kind == "dropped":
            return f"`{old}` dropped {where}"
        if self.kind == "never raised":
            return f"`{old}` never raises {where}"
        return f"`{old}` → `{new}` {where}"

    def apply(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return a copy of the body in which `new` is in place of `old`."""
        new = ast.fix_missing_locations(ast.copy_location(copy.deepcopy(self.new), self.old))
        # What `deepcopy` finds in its memo it takes as the copy.
        return copy.deepcopy(list(body), {id(self.old): new})


def list_mutations(function: Function) -> list[Mutation]:
    """List the changes of a function, in the order of its text; its inner functions have own ones.

    Text of errors, annotations and the docstring are left out.
    """
    return [mutation for statement in get_body(function) for mutation in _list_all(statement)]


def get_body(function: Function) -> list[ast.stmt]:
    """Return the statements after the docstring."""
    return function.body[0 if ast.get_docstring(function, clean=False) is None else 1 :]


def _list_all(node: ast.AST) -> Iterator[Mutation]:
    for make in _MAKERS:
        yield from make(node)
    for child in _list_children(node):
        yield from _list_all(child)


def _list_children(node: ast.AST) -> list[ast.AST]:
    own_scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if isinstance(node, own_scopes | ast.Raise | ast.JoinedStr | ast.Assert):
        return []
    if isinstance(node, ast.Lambda):
        return [node.body]
    if isinstance(node, ast.AnnAssign):
        return [] if node.value is None else [node.value]
    return list(ast.iter_child_nodes(node))


def _change_comparison(node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            ops = list(node.ops)
            ops[number] = _COMPARISONS[type(operator)]()
            yield Mutation("comparison", node, ast.Compare(node.left, ops, node.comparators))


def _change_logic(node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield Mutation("and, or", node, ast.BoolOp(other, node.values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Mutation("not", node, node.operand)


def _change_constant(node: ast.AST) -> Iterator[Mutation]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield Mutation("constant", node, ast.Constant(not node.value))
    elif isinstance(node.value, int) and node.value <= _LARGEST:
        yield Mutation("constant", node, ast.Constant(node.value + 1))


def _change_arithmetic(node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not _is_text(node.left) and not _is_text(node.right):
            operator = _ARITHMETIC[type(node.op)]()
            yield Mutation("arithmetic", node, ast.BinOp(node.left, operator, node.right))


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_constant or isinstance(node, ast.JoinedStr)


def _change_extreme(node: ast.AST) -> Iterator[Mutation]:
    if not isinstance(node, ast.Call):
        return
    called = node.func
    if isinstance(called, ast.Name) and called.id in _EXTREMES:
        yield Mutation("min, max", called, ast.Name(_EXTREMES[called.id], ast.Load()))
    if isinstance(called, ast.Attribute) and called.attr in _EXTREMES:
        other = ast.Attribute(called.value, _EXTREMES[called.attr], ast.Load())
        yield Mutation("min, max", called, other)


def _drop_statement(node: ast.AST) -> Iterator[Mutation]:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, ast.stmt) and (is_call or isinstance(node, ast.AugAssign)):
        yield Mutation("dropped", node, ast.Pass())
    if isinstance(node, ast.If) and [type(one) for one in node.body] == [ast.Raise]:
        never = ast.If(ast.Constant(False), node.body, node.orelse)
        yield Mutation("never raised", node, never)


def _change_return(node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield Mutation("return", node, ast.Return(ast.Constant(None)))


_MAKERS: tuple[Callable[[ast.AST], Iterator[Mutation]], ...] = (
    _change_comparison,
    _change_logic,
    _change_constant,
    _change_arithmetic,
    _change_extreme,
    _drop_statement,
    _change_return,
)


def _write(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        node = node.test
        return f"if {_shorten(ast.unparse(node))}: raise"
    return _shorten(ast.unparse(node))


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"
