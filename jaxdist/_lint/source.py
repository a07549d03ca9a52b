"""The text of a program: a Python file, or the cells of a notebook."""

import ast
import dataclasses
import io
import json
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

_IGNORE = re.compile(r"#\s*jaxdist:\s*ignore(?:\[([\w\s,]*)\])?")


class UnreadableError(Exception):
    """Raised for a file that Python cannot parse; it is a finding, and ends no command."""

    def __init__(self, text: str, line: int = 1, column: int = 1) -> None:
        super().__init__(text)
        self.line = line
        self.column = column


@dataclasses.dataclass(frozen=True)
class Source:
    """A program, and where its lines are in the file."""

    tree: ast.Module
    # Line of the program -> codes that are not wanted there; none means all.
    ignored: Mapping[int, frozenset[str]]
    # Line of the program -> number of the cell and line in it; empty for a Python file.
    cells: Mapping[int, tuple[int, int]]

    def is_ignored(self, line: int, code: str) -> bool:
        """Return whether a comment of the line switches a rule off."""
        codes = self.ignored.get(line)
        return codes is not None and (not codes or code in codes)


def read_source(path: Path) -> Source:
    """Read a Python file or a notebook.

    Raises:
        UnreadableError: The file is no UTF-8 text, no notebook, or no Python.
    """
    try:
        # Python reads files with other encodings too, where their first lines say so.
        if path.suffix == ".ipynb":
            return parse_notebook(path.read_text(encoding="utf-8"))
        with tokenize.open(path) as file:
            return parse_program(file.read())
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UnreadableError(f"the file is no text that Python reads: {error}") from error


def parse_program(text: str, cells: Mapping[int, tuple[int, int]] | None = None) -> Source:
    """Parse the text of a program.

    Raises:
        UnreadableError: The text is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        said = f"Python cannot parse this: {error.msg}"
        raise UnreadableError(said, error.lineno or 1, error.offset or 1) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UnreadableError(f"Python cannot parse this: {error}") from error
    return Source(tree, _find_ignored(text), cells or {})


def _find_ignored(text: str) -> dict[int, frozenset[str]]:
    found: dict[int, frozenset[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if match is not None:
            codes = re.findall(r"\w+", match[1] or "")
            found[token.start[0]] = frozenset(codes)
    return found


def parse_notebook(text: str) -> Source:
    """Parse the code cells of a notebook as one program.

    Raises:
        UnreadableError: The text is no notebook, or a cell is no Python.
    """
    try:
        cells = json.loads(text)["cells"]
        codes = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"the file is no notebook: {error!r}") from error
    lines: list[str] = []
    places: dict[int, tuple[int, int]] = {}
    for number, code in codes:
        is_other_language = code.lstrip().startswith("%%")
        for within, line in enumerate(code.splitlines(), 1):
            lines.append("" if is_other_language else _without_magic(line))
            places[len(lines)] = (number, within)
    try:
        return parse_program("\n".join(lines) + "\n", places)
    except UnreadableError as error:
        cell, line = places.get(error.line, (1, 1))
        raise UnreadableError(f"cell {cell}, line {line}: {error}") from error


def _without_magic(line: str) -> str:
    """Return the line, or `pass` for a command of IPython such as `%time` or `!pip`."""
    rest = line.lstrip()
    return line[: len(line) - len(rest)] + "pass" if rest.startswith(("%", "!")) else line
