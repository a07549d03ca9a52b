"""Reads expressions, and the facts about them."""

import ast
from collections.abc import Sequence

from jaxdist._lint.flow.facts import (
    Averaged,
    Batch,
    Dataset,
    Events,
    Fact,
    Function,
    LocalMean,
    Parts,
    Reduced,
    Scope,
    Variable,
    depends_on_batch,
    join,
)
from jaxdist._lint.flow.means import after_operator, read_division
from jaxdist._lint.names import Names, written

_ABOUT_SHAPES = {"shape", "dtype", "ndim", "size", "sharding", "name", "trainable"}
READS = {"value", "read_value", "numpy", "item"}
_PASSES_ELEMENTS = {"iter", "list", "tuple", "islice", "reversed", "track"}


class Expressions:
    """Reads expressions; a subclass reads functions."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.events = Events()
        self.scope = Scope({})
        self.depth_of_steps = 0
        self.knows_strategies = bool(names.modules & {"jaxdist", "tensorflow"})

    def read_call(self, node: ast.Call) -> Fact | None:
        """Return the fact about the result of a call."""
        raise NotImplementedError

    def call(
        self, function: Function, given: Sequence[Fact | None], named: dict[str, Fact | None]
    ) -> Fact | None:
        """Return the fact about the result of a function of the program."""
        raise NotImplementedError

    def read(self, node: ast.expr | None) -> Fact | None:
        """Return the fact about an expression, and note its events."""
        match node:
            case None | ast.Constant():
                return None
            case ast.Name(id=name):
                return self.scope.find(name)
            case ast.Call():
                return self.read_call(node)
            case ast.Attribute():
                return self._read_attribute(node)
            case ast.Tuple() | ast.List():
                if any(isinstance(e, ast.Starred) for e in node.elts):
                    return self._read_children(node)
                return Parts(tuple(enumerate([self.read(e) for e in node.elts])))
            case ast.Dict():
                keys = [getattr(key, "value", None) for key in node.keys]
                return Parts(tuple(zip(keys, map(self.read, node.values), strict=True)))
            case ast.BinOp():
                left, right = self.read(node.left), self.read(node.right)
                return read_division(node, left) or after_operator(node.op, left, right)
            case ast.Subscript():
                return self._read_subscript(node)
            case ast.IfExp():
                self.note_test(node.test)
                return join(self.read(node.body), self.read(node.orelse))
            case ast.NamedExpr(target=ast.Name(id=name)):
                self.scope.names[name] = self.read(node.value)
                return self.scope.names[name]
            case ast.Lambda():
                return Function(node, self.scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._read_comprehension(node)
        return self._read_children(node)

    def _read_children(self, node: ast.AST) -> Fact | None:
        children = [self.read(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return Batch() if any(map(depends_on_batch, children)) else None

    def _read_attribute(self, node: ast.Attribute) -> Fact | None:
        found = self.scope.find(ast.unparse(node))
        if found is not None:
            return found
        owner = self.read(node.value)
        if node.attr in _ABOUT_SHAPES:
            return None
        if isinstance(owner, Variable):
            return owner if node.attr in READS else None
        return Batch() if depends_on_batch(owner) else None

    def _read_subscript(self, node: ast.Subscript) -> Fact | None:
        owner = self.read(node.value)
        self.read(node.slice)
        if isinstance(owner, Parts):
            key = getattr(node.slice, "value", self)
            return owner.find(key) if key is not self else None
        if isinstance(owner, Reduced | Averaged):
            return owner
        return Batch() if depends_on_batch(owner) else None

    def _read_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Fact | None:
        outer, self.scope = self.scope, Scope({}, self.scope)
        for part in node.generators:
            self.bind(part.target, self.read_element(part.iter))
            for test in part.ifs:
                self.note_test(test)
        element = self.read(node.value if isinstance(node, ast.DictComp) else node.elt)
        self.scope = outer
        return element if isinstance(element, Reduced) else only_batch(element)

    def read_element(self, node: ast.expr) -> Fact | None:
        """Return the fact about an element of an iterable."""
        if isinstance(node, ast.Call) and written(node) in {"enumerate", "zip"}:
            elements = [self.read_element(argument) for argument in node.args]
            return Parts(
                tuple(enumerate(([None] if written(node) == "enumerate" else []) + elements))
            )
        if isinstance(node, ast.Call) and written(node) in _PASSES_ELEMENTS and node.args:
            return self.read_element(node.args[0])
        whole = self.read(node)
        if isinstance(whole, Dataset):
            return Batch() if whole.is_uneven else None
        return whole if isinstance(whole, Reduced | Batch) else None

    def bind(self, target: ast.AST, fact: Fact | None) -> None:
        """Assign the fact about a value to a target of an assignment."""
        match target:
            case ast.Name(id=name):
                self.scope.names[name] = fact
                if isinstance(fact, Variable):
                    self.events.variables.add(name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for position, element in enumerate(elements):
                    part = fact.find(position) if isinstance(fact, Parts) else fact
                    same = isinstance(part, Reduced | Batch | Averaged | LocalMean) or isinstance(
                        fact, Parts
                    )
                    self.bind(element, part if same else None)
            case ast.Starred(value=inner):
                self.bind(inner, only_batch(fact))
            case ast.Attribute():
                self.scope.names[ast.unparse(target)] = fact
            case ast.Subscript(value=ast.Name(id=name)):
                self.scope.names[name] = only_batch(join(self.scope.find(name), fact))

    def note_test(self, node: ast.expr) -> None:
        """Read a condition that Python evaluates."""
        self.read(node)


def only_batch(fact: Fact | None) -> Fact | None:
    """Return `Batch` if a value depends on a batch, and drop all other facts about it."""
    return Batch() if depends_on_batch(fact) else None
