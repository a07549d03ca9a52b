"""Chooses functions by their names, so that each keeps its mutant when it or others move.

The name is that inside of the module, such as `Shelf.take`: a function that moves to another module
keeps it. A function is in the sample if the hash of its name is below a fixed threshold, so that
functions that are added or removed change nothing for the others. Functions of the same name are
all in the sample or all out of it, and are told apart by their bodies.
"""

import ast
import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator

from tools.mutants.mutations import Function, Mutation, get_body, list_mutations

SEED = 0
# Chosen once, when it gave 300 mutants. Another value would be another sample.
THRESHOLD = 0.0425


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One function of the sample, with its change."""

    number: int
    # Inside of its module, such as `Shelf.take`.
    function: str
    # A digest of the body, which tells functions of one name apart.
    body: str
    file: str
    mutation: Mutation
    text: str
    rank: float
    node: Function = dataclasses.field(repr=False, compare=False)


def hash_of(*parts: str) -> float:
    """Return a number from 0 to 1 that depends on the seed and these texts only."""
    digest = hashlib.sha256("\0".join((str(SEED), *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def find_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Find all functions of a module, inner ones too, with their names."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ".".join(scope), node
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    return visit(tree, ())


def choose_mutation(name: str, function: Function) -> Mutation | None:
    """Choose one of a function's changes by hashes, so that an edit elsewhere in it keeps it."""
    best: tuple[float, Mutation] | None = None
    seen: dict[str, int] = {}
    for mutation in list_mutations(function):
        text = f"{mutation.kind} {ast.unparse(mutation.old)} {ast.unparse(mutation.new)}"
        seen[text] = seen.get(text, 0) + 1
        rank = hash_of(name, text, str(seen[text]))
        # Most functions return something, and every test notices that nothing comes back.
        rank = rank**0.25 if mutation.kind == "return" else rank
        if best is None or rank < best[0]:
            best = rank, mutation
    return best and best[1]


def fingerprint(function: Function) -> str:
    """Return a digest of the body that neither its docstring nor its place changes."""
    text = "\n".join(ast.dump(statement) for statement in get_body(function))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_trees(package: pathlib.Path) -> dict[str, ast.Module]:
    """Read all modules of a package by the names of their files in it."""
    return {
        file.relative_to(package).as_posix(): ast.parse(file.read_text())
        for file in sorted(package.rglob("*.py"))
    }


def sample(trees: dict[str, ast.Module], threshold: float = THRESHOLD) -> list[Mutant]:
    """Choose the mutants of a package; their numbers are places in this list."""
    found: list[Mutant] = []
    for file, tree in trees.items():
        for name, function in find_functions(tree):
            rank = hash_of(name)
            mutation = choose_mutation(name, function) if rank < threshold else None
            if mutation is not None:
                text = mutation.describe(function.lineno)
                body = fingerprint(function)
                found.append(Mutant(len(found), name, body, file, mutation, text, rank, function))
    return found
