"""JD008: Python side effects in a step happen only once, when it is traced."""

import ast
from collections.abc import Iterator

from jaxdist._lint.finding import Finding, Program, Rule
from jaxdist._lint.names import walk_without

RULE = Rule(
    "JD008",
    "side-effect",
    "A Python side effect in a step happens once, when JAX traces the step.",
    "docs/porting/coming-from-tf-distribute.md#order-of-replicas",
)
_CHANGES = {"append", "extend", "insert"}
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic"}
_RANDOM = ("numpy.random.", "random.")
_NOT_DRAWN = {"default_rng", "RandomState", "Generator", "Random", "SeedSequence"}
_STATIC = {"shape", "dtype", "ndim", "size", "sharding"}
_CALLBACKS = ("callback", "print")


def find(program: Program) -> Iterator[Finding]:
    """Find prints, changes of outer lists and counters, clocks and random numbers in steps."""
    if program.uses("run_eagerly", "run_functions_eagerly"):
        return
    for step in program.events.steps:
        if isinstance(step.node, ast.FunctionDef):
            yield from _Search(program, step.node).search()


class _Search:
    def __init__(self, program: Program, step: ast.FunctionDef) -> None:
        self._names = program.names
        self._step = step
        self._local = _find_stored(step) | _find_arguments(step)
        self._outer: set[str] = set()
        self._traced = _find_traced(step)

    def search(self) -> Iterator[Finding]:
        nodes = list(_walk(self._step))
        for node in nodes:
            if isinstance(node, ast.Global | ast.Nonlocal) and not self._is_own(node):
                self._outer |= set(node.names)
        for node in nodes:
            if isinstance(node, ast.Call):
                yield from self._check_call(node)
            elif isinstance(node, ast.Assign | ast.AugAssign):
                yield from self._check_assignment(node)

    def _is_own(self, node: ast.Global | ast.Nonlocal) -> bool:
        """Return whether a nested function names variables of the step itself."""
        assignments = [s for s in self._step.body if isinstance(s, ast.Assign | ast.AnnAssign)]
        own = set[str]().union(*map(_find_stored, assignments))
        return isinstance(node, ast.Nonlocal) and set(node.names) <= own

    def _check_call(self, node: ast.Call) -> Iterator[Finding]:
        name = self._names.find(node.func)
        match node.func:
            case ast.Name(id="print") if self._shows_traced(node):
                yield RULE.at(
                    node,
                    "print in a step prints once, and shows traced values.",
                    "call jax.debug.print, or print what the step returns.",
                )
            case ast.Attribute(value=ast.Name(id=owner), attr=method) if (
                method in _CHANGES
                and owner not in self._local
                and not name
                and self._shows_traced(node)
            ):
                yield RULE.at(
                    node,
                    f"{owner}.{method} in a step runs once, and keeps a traced value.",
                    "return the value from the step, and collect it outside.",
                )
        if name in _CLOCKS:
            yield RULE.at(
                node,
                f"{name} in a step is read once, and its time is a constant of the program.",
                "read the clock outside of the step.",
            )
        if name.startswith(_RANDOM) and name.rpartition(".")[2] not in _NOT_DRAWN:
            yield RULE.at(
                node,
                f"{name} in a step is drawn once, and is the same number in every step.",
                "use jax.random with a key that is an argument of the step, or nnx.Rngs.",
            )

    def _shows_traced(self, node: ast.Call) -> bool:
        return any(_uses(argument, self._traced) for argument in node.args)

    def _check_assignment(self, node: ast.Assign | ast.AugAssign) -> Iterator[Finding]:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id in self._outer:
                yield RULE.at(
                    node,
                    f"{target.id} outside of the step is assigned once, when the step is traced.",
                    "pass it as an argument and return it, or use a jaxdist.Variable.",
                )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Iterate over the nodes of a function, without those that it passes to callbacks."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and _is_callback(call)]
    hosts = {ast.unparse(call.args[0]) for call in calls if call.args}
    passed = {id(part) for call in calls for part in ast.iter_child_nodes(call)}
    return walk_without(
        [node],
        lambda n: id(n) in passed or (isinstance(n, ast.FunctionDef) and n.name in hosts),
    )


def _is_callback(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr.endswith(_CALLBACKS)


def _find_stored(node: ast.AST) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def _find_arguments(node: ast.AST) -> set[str]:
    return {argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)}


def _find_traced(node: ast.AST) -> set[str]:
    """Return the arguments of a step, and the names computed from them."""
    found = _find_arguments(node)
    for statement in ast.walk(node):
        match statement:
            case ast.Assign(targets=targets, value=value) if _uses(value, found):
                stored = [name for target in targets for name in ast.walk(target)]
            case ast.For(target=target, iter=value) if _uses(value, found):
                stored = list(ast.walk(target))
            case _:
                continue
        found |= {name.id for name in stored if isinstance(name, ast.Name)}
    return found


def _uses(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression uses one of the names for more than its shape."""
    used = walk_without([node], lambda n: isinstance(n, ast.Attribute) and n.attr in _STATIC)
    return any(isinstance(n, ast.Name) and n.id in names for n in used)
