"""Runs the rules on programs, and locates their findings."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxdist._lint.finding import Finding, Program, Spell
from jaxdist._lint.flow import read_program
from jaxdist._lint.names import Names
from jaxdist._lint.rules import RULES
from jaxdist._lint.source import Source, find_files, parse_program, read_source

# No rule applies to a program that imports none of these.
_ABOUT = {"flax", "jax", "jaxdist", "tensorflow"}


@dataclasses.dataclass(frozen=True)
class Located:
    """A finding, and its place in a file as a reader sees it."""

    path: Path
    cell: int | None
    line: int
    finding: Finding

    @property
    def place(self) -> str:
        """The place in the notation of editors: `train.py:12:5`, `train.ipynb:cell 3:2:5`."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.finding.column}"


def _lint_source(source: Source, spell: Spell) -> list[Finding]:
    """Return the findings of the rules in a program, in the order of its lines."""
    names = Names(source.tree)
    if not names.modules & _ABOUT:
        return []
    program = Program(source.tree, names, read_program(source.tree, names), spell)
    found: dict[tuple[int, int, str], Finding] = {}
    for find in RULES.values():
        for finding in find(program):
            key = (finding.line, finding.column, finding.rule.code)
            if not source.is_ignored(finding.line, finding.rule.code):
                found.setdefault(key, finding)
    return [found[key] for key in sorted(found)]


def lint_text(text: str, spell: Spell) -> list[Finding]:
    """Return the findings of the rules in the text of a program."""
    source = parse_program(text)
    return [source] if isinstance(source, Finding) else _lint_source(source, spell)


def lint_paths(paths: Sequence[Path], spell: Spell) -> tuple[list[Located], int]:
    """Return the findings of the rules in files and folders, and the number of files read.

    Args:
        paths: Python files, notebooks, and folders of them.
        spell: Maps a name of `tf.distribute` to its spelling in jaxdist, or '', and to advice on
            what to use instead.

    Raises:
        ArgumentError: A path does not exist, or contains no program.
    """
    found: list[Located] = []
    files = find_files(paths)
    for path in files:
        source = read_source(path)
        if isinstance(source, Finding):
            found.append(Located(path, None, source.line, source))
            continue
        for finding in _lint_source(source, spell):
            cell, line = source.cells.get(finding.line, (None, finding.line))
            found.append(Located(path, cell, line, finding))
    return found, len(files)
