"""Compiles all mutants into one copy of the tree, in which an environment variable switches one on.

The body of each function of the sample becomes `if is_on(7): <changed body> else: <body>`. The
sources of the copy stay as they are: only the bytecode next to them is of the woven modules, and is
marked so that Python does not compare it with the source. So tests that read sources, or look at
lines of tracebacks, see what they see without mutants.
"""

import ast
import compileall
import importlib.util
import marshal
import pathlib
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tools.mutants.mutations import get_body
from tools.mutants.sample import Mutant

# The names of `active` and `plugin` next to the package, where all its processes find them.
RUNTIME = "jaxdist_mutants"
PLUGIN = "jaxdist_mutants_plugin"
# In modules. With underscores at both ends, so that no class mangles it and tests that list the
# names of modules leave it out.
_NAME = "__mutants__"
# PEP 552: the file has a hash in place of a time, and the source is not looked at.
_UNCHECKED = (0b01).to_bytes(4, "little")


def make_tree(
    root: pathlib.Path,
    files: Iterable[str],
    target: pathlib.Path,
    package: str,
    trees: dict[str, ast.Module],
    mutants: Sequence[Mutant],
) -> None:
    """Copy `files` of `root` to `target`, where the package is compiled with its mutants.

    `trees` are the modules that `mutants` are of. They are changed.
    """
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, target / file)
    copy_runtime(target)
    # Runs cannot write in the tree, and each of them would compile all of it.
    compileall.compile_dir(target, quiet=2)
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for name, own in by_file.items():
        weave(trees[name], own)
        _write_bytecode(trees[name], target / package / name)


def copy_runtime(target: pathlib.Path) -> None:
    """Copy what runs in the tree beside the package, where it is not there as it is here."""
    here = pathlib.Path(__file__).parent
    for name, copied in (("active.py", f"{RUNTIME}.py"), ("plugin.py", f"{PLUGIN}.py")):
        text, file = (here / name).read_text(), target / copied
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def weave(tree: ast.Module, mutants: Sequence[Mutant]) -> None:
    """Add the mutants of a module to its tree."""
    # From the end: an inner function comes after the one around it, which gets two copies of it.
    for mutant in reversed(mutants):
        _weave_function(mutant)
    place = 0 if ast.get_docstring(tree, clean=False) is None else 1
    while isinstance(tree.body[place], ast.ImportFrom) and _is_future(tree.body[place]):
        place += 1
    tree.body.insert(place, ast.Import([ast.alias(RUNTIME, _NAME)]))
    ast.fix_missing_locations(tree)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _weave_function(mutant: Mutant) -> None:
    node = mutant.node
    body = get_body(node)
    docstring = node.body[: len(node.body) - len(body)]
    # Names are declared once, before both bodies.
    collector = _TakeDeclarations()
    body = [collector.visit(statement) for statement in body]
    changed = mutant.mutation.apply(body)
    _insert_before(body, mutant.mutation.old, ast.Expr(_call("reach", mutant.number)))
    choice = ast.If(_call("is_on", mutant.number), changed, body)
    ast.copy_location(choice, body[-1])
    node.body = [*docstring, *collector.found, choice]
    ast.fix_missing_locations(node)


def _call(name: str, number: int) -> ast.Call:
    function = ast.Attribute(ast.Name(_NAME, ast.Load()), name, ast.Load())
    return ast.Call(function, [ast.Constant(number)], [])


class _TakeDeclarations(ast.NodeTransformer):
    """Takes `global` and `nonlocal` out of a function, not out of inner ones."""

    def __init__(self) -> None:
        self.found: list[ast.stmt] = []

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        self.found.append(node)
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt:
        self.found.append(node)
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        return node


def _insert_before(body: list[ast.stmt], old: ast.AST, new: ast.stmt) -> bool:
    """Insert a statement before the innermost one that contains `old`."""
    for place, statement in enumerate(body):
        if any(node is old for node in ast.walk(statement)):
            if not any(_insert_before(inner, old, new) for inner in _list_bodies(statement)):
                body.insert(place, ast.copy_location(new, statement))
            return True
    return False


def _list_bodies(node: ast.AST) -> list[list[ast.stmt]]:
    """List the lists of statements directly inside of a statement."""
    found: list[list[ast.stmt]] = []
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            found.append(value)
        elif isinstance(value, list):
            parts = [one for one in value if isinstance(one, ast.ExceptHandler | ast.match_case)]
            found += [inner for part in parts for inner in _list_bodies(part)]
    return found


def _write_bytecode(tree: ast.Module, source: pathlib.Path) -> None:
    code = compile(tree, str(source), "exec", dont_inherit=True)
    digest = importlib.util.source_hash(source.read_bytes())
    file = pathlib.Path(importlib.util.cache_from_source(str(source)))
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(importlib.util.MAGIC_NUMBER + _UNCHECKED + digest + marshal.dumps(code))
