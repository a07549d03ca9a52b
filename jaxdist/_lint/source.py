"""Finds programs, and reads their text: a Python file, or the cells of a notebook."""

import ast
import dataclasses
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxdist._lint.finding import UNREADABLE, Finding
from jaxdist.errors import ArgumentError

_IGNORE = re.compile(r"#\s*jaxdist:\s*ignore(?:\[([\w\s,]*)\])?")
# An IPython command whose result is assigned to names: `files = !ls`.
_ASSIGNED_MAGIC = re.compile(r"^([\w\s,.*\[\]()]+=)\s*[%!].*")


def _as_finding(text: str, line: int = 1, column: int = 1) -> Finding:
    """Return the fault of a file that Python cannot parse. It ends no command."""
    return Finding(UNREADABLE, line, column, f"{text}.", "correct the file.")


@dataclasses.dataclass(frozen=True)
class Source:
    """A program, and the places of its lines in the file."""

    tree: ast.Module
    # Line of the program -> codes that are switched off there; an empty set means all.
    ignored: Mapping[int, frozenset[str]]
    # Line of the program -> number of the cell and line in it; empty for a Python file.
    cells: Mapping[int, tuple[int, int]]

    def is_ignored(self, line: int, code: str) -> bool:
        """Return whether a comment in the line switches a rule off."""
        codes = self.ignored.get(line)
        return codes is not None and (not codes or code in codes)


def read_source(path: Path) -> Source | Finding:
    """Read a Python file or a notebook."""
    try:
        # Python also reads files with other encodings, if their first lines name them.
        if path.suffix == ".ipynb":
            return parse_notebook(path.read_text(encoding="utf-8"))
        with tokenize.open(path) as file:
            return parse_program(file.read())
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        return _as_finding(f"Python cannot read the file as text: {error}")


def parse_program(
    text: str, cells: Mapping[int, tuple[int, int]] | None = None
) -> Source | Finding:
    """Parse the text of a program.

    Args:
        text: The whole text.
        cells: The places of its lines in a notebook, as in `Source`.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        fault = f"Python cannot parse this: {error.msg}"
        return _as_finding(fault, error.lineno or 1, error.offset or 1)
    except (ValueError, RecursionError, MemoryError) as error:
        return _as_finding(f"Python cannot parse this: {error}")
    return Source(tree, _find_ignored(text), cells or {})


def _find_ignored(text: str) -> dict[int, frozenset[str]]:
    found: dict[int, frozenset[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if match is not None:
            codes = re.findall(r"\w+", match[1] or "")
            found[token.start[0]] = frozenset(codes)
    return found


def parse_notebook(text: str) -> Source | Finding:
    """Parse the code cells of a notebook as one program."""
    try:
        cells = json.loads(text)["cells"]
        codes = [
            (number, "".join(cell["source"]))
            for number, cell in enumerate(cells, 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError) as error:
        return _as_finding(f"the file is not a notebook: {error!r}")
    lines: list[str] = []
    places: dict[int, tuple[int, int]] = {}
    for number, code in codes:
        is_other_language, continues = code.lstrip().startswith("%%"), False
        for within, line in enumerate(code.splitlines(), 1):
            plain = "" if is_other_language or continues else _without_magic(line)
            # As in a shell, a backslash at the end of a command continues it.
            continues = line.endswith("\\") and plain != line
            lines.append(plain)
            places[len(lines)] = (number, within)
    source = parse_program("\n".join(lines) + "\n", places)
    if isinstance(source, Finding):
        cell, line = places.get(source.line, (1, 1))
        return dataclasses.replace(
            source, line=1, column=1, found=f"cell {cell}, line {line}: {source.found}"
        )
    return source


def _without_magic(line: str) -> str:
    """Return the line without IPython commands such as `%time`, `!pip` or `files = !ls`."""
    rest = line.lstrip()
    if rest.startswith(("%", "!")):
        return line[: len(line) - len(rest)] + "pass"
    return _ASSIGNED_MAGIC.sub(r"\1 None", line)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return all programs in files and folders, each once, in the order of their names.

    Raises:
        ArgumentError: A path does not exist, or contains no program.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ArgumentError(
                f"The file or folder {str(path)!r} does not exist."
                "\n\njaxdist lint takes Python files, notebooks, and folders."
                f"\n\nThe current folder is {Path.cwd()}."
            )
        # A named file is read as Python, whatever its name is.
        inside = sorted(_walk(path)) if path.is_dir() else [path]
        if not inside:
            raise ArgumentError(
                f"The folder {str(path)!r} has no programs."
                "\n\njaxdist lint takes Python files, notebooks, and folders with some. Hidden "
                "folders and virtual environments are left out."
                "\n\nName a file, or another folder."
            )
        found.update(dict.fromkeys(inside))
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name.startswith(".") or entry.name in {"__pycache__", "node_modules"}:
            continue
        if entry.is_dir() and not entry.is_symlink():
            if not (entry / "pyvenv.cfg").exists():
                yield from _walk(entry)
        elif entry.suffix in {".py", ".ipynb"} and entry.is_file():
            yield entry
