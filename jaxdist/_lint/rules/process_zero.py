"""JD005: only one process makes a call that all processes have to make."""

import ast
from collections.abc import Iterator, Sequence

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.names import walk_without, written

RULE = Rule(
    "JD005",
    "one-process",
    "All processes of a job call run, reduce, gather and save, and collectives, in the same order.",
    "docs/machines/multi-worker.md",
)
_NUMBERS = {"process_index", "process_id", "task_id", "task_index"}
_FIRST = {"is_chief", "is_main_process", "is_master", "is_first_process", "is_coordinator"}
_Functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def find(program: Program) -> Iterator[Finding]:
    """Find joint calls under `if jax.process_index() == 0` and similar conditions."""
    # With parameter servers one process runs the program, and the others serve it.
    if program.is_distributed and not program.uses("ParameterServerStrategy"):
        yield from _Search(program).search(program.tree)


class _Search:
    def __init__(self, program: Program) -> None:
        self._joint = dict(program.events.joint_calls)
        self._first = set(_FIRST)
        for node in ast.walk(program.tree):
            if isinstance(node, ast.Assign) and self._is_first(node.value):
                self._first |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        self._add_functions(program.tree)

    def _add_functions(self, tree: ast.Module) -> None:
        """Also count calls of module functions that make such calls."""
        makers = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and next(self._find_calls(node.body), None)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in makers:
                self._joint.setdefault(id(node), written(node))

    def search(self, tree: ast.Module) -> Iterator[Finding]:
        for node in ast.walk(tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    yield from self._search_block(block)

    def _search_block(self, block: Sequence[ast.stmt]) -> Iterator[Finding]:
        for position, node in enumerate(block):
            choice = self._is_first(node.test) if isinstance(node, ast.If) else None
            if not isinstance(node, ast.If) or choice is None:
                continue
            stay = node.orelse
            if isinstance(node.body[-1], ast.Return | ast.Continue):
                # Those that pass the test leave here, so the rest of the block is for the others.
                stay = [*stay, *block[position + 1 :]]
            one, others = (node.body, stay) if choice else (stay, node.body)
            yield from self._compare(one, others, ast.unparse(node.test))

    def _compare(
        self, one: Sequence[ast.stmt], others: Sequence[ast.stmt], test: str
    ) -> Iterator[Finding]:
        elsewhere = {self._joint[id(call)] for call in self._find_calls(others)}
        for call in self._find_calls(one):
            what = self._joint[id(call)]
            if what in elsewhere:
                continue
            found = (
                f"{what} is called by one process only, under `{test}`. It waits for the others."
            )
            fix = "call it in every process, and do only the printing or writing in one of them."
            yield RULE.at(call, found, fix)

    def _find_calls(self, block: Sequence[ast.stmt]) -> Iterator[ast.Call]:
        """Iterate over the joint calls of statements, without those of nested functions."""
        for node in walk_without(block, lambda node: isinstance(node, _Functions)):
            if isinstance(node, ast.Call) and id(node) in self._joint:
                yield node

    def _is_first(self, test: ast.expr) -> bool | None:
        """Return True if only process 0 passes a test, False if only the others do; else None."""
        match test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
                if isinstance(left, ast.Constant):
                    left, right = right, left
                if written(left) in _NUMBERS and getattr(right, "value", None) == 0:
                    return isinstance(op, ast.Eq)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                if written(operand) in _NUMBERS:
                    return True
                inner = self._is_first(operand)
                return None if inner is None else not inner
            case ast.BoolOp(op=ast.And(), values=values):
                choices = [self._is_first(value) for value in values]
                return next((choice for choice in choices if choice is True), None)
            case ast.Name() | ast.Attribute() | ast.Call():
                if written(test) in self._first:
                    return True
        return None
