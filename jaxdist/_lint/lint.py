"""From the text of a program to what the rules find in it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxdist._lint.files import find_files
from jaxdist._lint.finding import UNREADABLE, Finding
from jaxdist._lint.flow import read_program
from jaxdist._lint.names import Names
from jaxdist._lint.program import Program, Spell
from jaxdist._lint.rules import RULES
from jaxdist._lint.source import Source, UnreadableError, read_source


@dataclasses.dataclass(frozen=True)
class Located:
    """A finding, and the place in a file that a reader looks at."""

    path: Path
    cell: int | None
    line: int
    finding: Finding

    @property
    def place(self) -> str:
        """The place as editors read it: `train.py:12:5`, `train.ipynb:cell 3:2:5`."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.finding.column}"


def lint_source(source: Source, spell: Spell) -> list[Finding]:
    """Return what the rules find in a program, in the order of its lines."""
    names = Names(source.tree)
    program = Program(source.tree, names, read_program(source.tree, names), spell)
    found: dict[tuple[int, int, str], Finding] = {}
    for find in RULES.values():
        for finding in find(program):
            key = (finding.line, finding.column, finding.rule.code)
            if not source.is_ignored(finding.line, finding.rule.code):
                found.setdefault(key, finding)
    return [found[key] for key in sorted(found)]


def lint_paths(paths: Sequence[Path], spell: Spell) -> tuple[list[Located], int]:
    """Return what the rules find in files and folders, and how many files were read.

    Args:
        paths: Python files, notebooks, and folders of them.
        spell: Function from a name of `tf.distribute` to its spelling in jaxdist, or ''; and
            what to do in its place.

    Raises:
        ArgumentError: A path does not exist, or there is no program in it.
    """
    found: list[Located] = []
    files = find_files(paths)
    for path in files:
        try:
            source = read_source(path)
        except UnreadableError as error:
            finding = Finding(
                UNREADABLE, error.line, error.column, f"{error}.", "correct the file."
            )
            found.append(Located(path, None, error.line, finding))
            continue
        for finding in lint_source(source, spell):
            cell, line = source.cells.get(finding.line, (None, finding.line))
            found.append(Located(path, cell, line, finding))
    return found, len(files)
