"""A program in the form that rules use."""

import ast
import dataclasses
from collections.abc import Callable

from jaxdist._lint.flow import Events
from jaxdist._lint.names import Names

# Name within jaxdist -> (spelling or '', what to use instead).
Spell = Callable[[str], tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Program:
    """The tree of a program, its imports, its events, and the names of jaxdist."""

    tree: ast.Module
    names: Names
    events: Events
    spell: Spell

    @property
    def is_distributed(self) -> bool:
        """Whether the program imports jaxdist or TensorFlow."""
        return bool(self.names.modules & {"jaxdist", "tensorflow"})

    def uses(self, *names: str) -> bool:
        """Return whether the program has a name or attribute with one of these spellings."""
        return any(
            (isinstance(node, ast.Attribute) and node.attr in names)
            or (isinstance(node, ast.Name) and node.id in names)
            or (isinstance(node, ast.alias) and node.name in names)
            for node in ast.walk(self.tree)
        )
