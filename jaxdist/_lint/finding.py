"""`Rule`, and `Finding`: a place that breaks a rule."""

import ast
import dataclasses


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
