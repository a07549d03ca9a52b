"""Reads a program: its statements and its functions."""

import ast
import functools
from collections.abc import Sequence

from jaxdist._lint.flow.expressions import Expressions
from jaxdist._lint.flow.facts import (
    Averaged,
    Events,
    Fact,
    Function,
    Gradient,
    LocalMean,
    Reduced,
    Scope,
    Test,
    Variable,
    join,
)
from jaxdist._lint.names import Names

# If a program calls functions in circles, or in very many ways, reading stops at this limit.
_MOST_CALLS = 2_000
_MOST_DEPTH = 20

_COMPARED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)


def read_program(tree: ast.Module, names: Names) -> Events:
    """Return the events of a program, without running it."""
    reader = Reader(names)
    reader.read_module(tree)
    return reader.events


class Reader(Expressions):
    """Goes through statements and functions."""

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._calls = 0
        self._active: list[int] = []
        self._read: set[int] = set()
        self._results: list[list[Fact | None]] = [[]]
        self._defined: list[Function] = []

    def read_module(self, tree: ast.Module) -> None:
        """Read the module, then each function that nothing in it calls."""
        self.read_block(tree.body)
        for function in self._defined:
            if id(function.node) not in self._read:
                self.call(function, [], {})

    def read_block(self, block: Sequence[ast.stmt]) -> None:
        """Read statements one after another."""
        for statement in block:
            self._read_statement(statement)

    def _read_statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node, is_method=False)
            case ast.ClassDef():
                self._read_class(node)
            case ast.Return():
                self._results[-1].append(self.read(node.value))
            case ast.Assign():
                fact = self.read(node.value)
                for target in node.targets:
                    self.bind(target, fact)
            case ast.AnnAssign():
                self.bind(node.target, self.read(node.value))
            case ast.AugAssign():
                combined = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                self.bind(node.target, self.read(combined))
            case ast.If():
                self.note_test(node.test)
                self._read_branches([node.body, node.orelse])
            case ast.While():
                self.note_test(node.test)
                self._read_branches([node.body, []])
                self.read_block(node.orelse)
            case ast.For() | ast.AsyncFor():
                self.bind(node.target, self.read_element(node.iter))
                self._read_branches([node.body, []])
                self.read_block(node.orelse)
            case ast.Try():
                self._read_branches([node.body + node.orelse, *(h.body for h in node.handlers)])
                self.read_block(node.finalbody)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    fact = self.read(item.context_expr)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, fact)
                self.read_block(node.body)
            case ast.Match():
                self.read(node.subject)
                self._read_branches([case.body for case in node.cases])
            case ast.Assert():
                self.note_test(node.test)
            case ast.Expr():
                self.read(node.value)

    def _read_branches(self, blocks: Sequence[Sequence[ast.stmt]]) -> None:
        """Read blocks, one of which runs, and merge the facts after each of them."""
        before = dict(self.scope.names)
        ends: list[dict[str, Fact | None]] = []
        for block in blocks:
            self.scope.names = dict(before)
            self.read_block(block)
            if not (block and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue)):
                ends.append(self.scope.names)
        if not ends:
            self.scope.names = before
            return
        merged = dict(ends[0])
        for end in ends[1:]:
            for name in merged.keys() | end.keys():
                # If only one branch defines a name, any use of the name has that value.
                one, other = merged.get(name, end.get(name)), end.get(name, merged.get(name))
                merged[name] = join(one, other)
        self.scope.names = merged

    def note_test(self, node: ast.expr) -> None:
        """Read a condition, and note values in it that are unknown while a step is traced."""
        fact = self.read(node)
        if not self.depth_of_steps:
            return
        match node:
            case ast.BoolOp(values=values):
                for value in values:
                    self.note_test(value)
            case ast.UnaryOp(operand=operand):
                self.note_test(operand)
            case ast.Compare(left=left, ops=ops, comparators=others):
                if all(isinstance(op, _COMPARED) for op in ops):
                    for value in [left, *others]:
                        self._note_value(node, value, self.read(value))
            case _:
                self._note_value(node, node, fact)

    def _note_value(self, test: ast.expr, value: ast.expr, fact: Fact | None) -> None:
        if isinstance(fact, Variable | Reduced | Averaged | LocalMean):
            self.events.tests.append(Test(test, value))

    # Functions

    def _define(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool
    ) -> Function | Gradient:
        function = Function(node, self.scope, is_method)
        self._defined.append(function)
        found: Function | Gradient = function
        for decorator in node.decorator_list:
            found = self._decorate(decorator, found)
        if not is_method:
            self.scope.names[node.name] = found
        return found

    def _decorate(self, node: ast.expr, found: Function | Gradient) -> Function | Gradient:
        """Read `@jax.value_and_grad`, also with arguments or through functools.partial."""
        parts = [node, node.func, *node.args] if isinstance(node, ast.Call) else [node]
        has_aux = isinstance(node, ast.Call) and any(k.arg == "has_aux" for k in node.keywords)
        for part in parts:
            last = self.names.find(part).rpartition(".")[2]
            if last in {"grad", "value_and_grad"} and isinstance(found, Function):
                return Gradient(found, last == "value_and_grad", has_aux)
        return found

    def _read_class(self, node: ast.ClassDef) -> None:
        """Read the methods; `self.x` is a name that all of them see."""
        outer, self.scope = self.scope, Scope({}, self.scope)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                function = self._define(statement, is_method=True)
                self.scope.names[f"self.{statement.name}"] = function
            else:
                self._read_statement(statement)
        self.scope = outer
        self.scope.names[node.name] = None

    def call(
        self, function: Function, given: Sequence[Fact | None], named: dict[str, Fact | None]
    ) -> Fact | None:
        """Return the fact about the result of a function of the program."""
        node = function.node
        is_circle = id(node) in self._active
        if is_circle or self._calls >= _MOST_CALLS or len(self._active) >= _MOST_DEPTH:
            return None
        self._calls += 1
        self._read.add(id(node))
        outer, self.scope = self.scope, Scope(_bind(function, given, named), function.scope)
        self._active.append(id(node))
        self._results.append([])
        if isinstance(node, ast.Lambda):
            self._results[-1].append(self.read(node.body))
        else:
            self.read_block(node.body)
        if function.is_method:
            # Other methods see `self.x = value`.
            attributes = {k: v for k, v in self.scope.names.items() if k.startswith("self.")}
            function.scope.names.update(attributes)
        results = self._results.pop()
        self._active.pop()
        self.scope = outer
        return functools.reduce(join, results) if results else None


def _bind(
    function: Function, given: Sequence[Fact | None], named: dict[str, Fact | None]
) -> dict[str, Fact | None]:
    arguments = function.node.args
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    names: dict[str, Fact | None] = dict.fromkeys(
        [*positional, *(a.arg for a in arguments.kwonlyargs)]
    )
    rest = [arguments.vararg, arguments.kwarg]
    names.update({a.arg: None for a in rest if a is not None})
    if function.is_method:
        positional = positional[1:]
    names.update(zip(positional, given, strict=False))
    names.update({name: fact for name, fact in named.items() if name in names})
    return names
