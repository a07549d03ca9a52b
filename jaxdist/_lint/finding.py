"""`Rule`, `Finding`: a place that breaks a rule, and `Program`: what rules read."""

import ast
import dataclasses
from collections.abc import Callable

from jaxdist._lint.flow import Events
from jaxdist._lint.names import Names


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: its code and name, its reason, and the page that explains it."""

    code: str
    name: str
    reason: str
    page: str

    def at(self, node: ast.AST, found: str, fix: str) -> "Finding":
        """Return a finding of this rule at a node of the tree."""
        line = getattr(node, "lineno", 1)
        return Finding(self, line, getattr(node, "col_offset", 0) + 1, found, fix)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place in a program that breaks a rule; lines and columns count from 1."""

    rule: Rule
    line: int
    column: int
    found: str
    fix: str


UNREADABLE = Rule(
    "JD000",
    "unreadable",
    "jaxdist lint reads files that Python can parse.",
    "docs/how-to/lint.md",
)


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
