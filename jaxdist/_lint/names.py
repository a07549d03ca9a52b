"""Finds full names in a program with imports: `jnp.mean` is `jax.numpy.mean`."""

import ast
from collections.abc import Callable, Container, Iterable, Iterator


class Names:
    """The imports of a program, anywhere in it."""

    def __init__(self, tree: ast.Module) -> None:
        self.aliases: dict[str, str] = {}
        self.modules: set[str] = set()  # first parts of all imported names: `jax`, `tensorflow`
        for node in ast.walk(tree):
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                # `import jax.numpy` binds `jax`; `import jax.numpy as jnp` binds the module.
                self.aliases[alias.asname or first] = alias.name if alias.asname else first
                self.modules.add(first)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self.aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            self.modules.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Assign):
            self._read_import_module(node)

    def _read_import_module(self, node: ast.Assign) -> None:
        """Read `tf = importlib.import_module("tensorflow")`."""
        match node.value, node.targets:
            case (
                ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(str(name))]),
                [ast.Name(id=target)],
            ):
                self.aliases[target] = name
                self.modules.add(name.partition(".")[0])

    def find(self, node: ast.AST, shadowed: Container[str] = ()) -> str:
        """Return the full name of an expression, or '' if it does not come from an import.

        Args:
            node: An expression, such as `lax.pmean`.
            shadowed: Names that are something else here.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in shadowed:
            return ""
        first = self.aliases.get(node.id)
        return ".".join([first, *reversed(parts)]) if first else ""


def written(node: ast.AST) -> str:
    """Return the last part of a name in the program's text: `run` of `self.strategy.run`."""
    if isinstance(node, ast.Call):
        return written(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def walk_without(
    nodes: Iterable[ast.AST], is_left_out: Callable[[ast.AST], bool]
) -> Iterator[ast.AST]:
    """Yield nodes and all nodes inside them, level by level, but nothing of what is left out."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        if not is_left_out(node):
            yield node
            waiting += ast.iter_child_nodes(node)
