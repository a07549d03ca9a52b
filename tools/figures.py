"""`python -m tools.figures`: the figures of the layout, one a line; a report, never a gate.

Every figure has one definition, which is printed with it, so that two measurements can be compared.
"""

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator

from tests import test_layers as layers
from tools.additions import ADDITIONS

SMALL = 60
# Irregular participles that were names of functions once.
_PARTICIPLES = set(
    "built cut found given held kept known laid made put read said sent shown split spread taken "
    "told written".split()
)
_NO_PARTICIPLES = {"embed", "need", "speed"}
# Of these, the same word is also the imperative.
_IMPERATIVE = {"cut", "put", "read", "split", "spread"}


def _functions(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def code_lines(source: str) -> int:
    """Lines that hold code: no comment, no docstring, no blank."""
    tree = ast.parse(source)
    texts: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def comment_lines(source: str) -> int:
    """Lines that have a comment; directives to tools are none."""
    directive = re.compile(r"#\s*(type:|noqa|pyrefly:|fmt:|pragma)")
    return sum(
        token.type == tokenize.COMMENT and not directive.match(token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def is_participle(name: str) -> bool:
    """Whether the first word of a function's name is a participle."""
    first = name.strip("_").split("_")[0]
    if first in _IMPERATIVE or len(first) < 4:
        return False
    return first in _PARTICIPLES or (
        first.endswith("ed") and first not in {"embed", "need", "speed"}
    )


def importers(files: layers.Files) -> dict[str, set[str]]:
    """For each module, the modules that import it, directly or one of its names."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for name, source in files.items():
        for dotted, _ in layers._imports(source):
            if dotted.startswith("jaxdist."):
                module = layers._module(dotted, files)
                if module != name:
                    found[module].add(name)
    return found


def walkers(files: layers.Files) -> list[str]:
    """Files that loop over the equations of a jaxpr and keep values of variables in a dict."""
    loop = re.compile(r"for \w+(?:, \w+)? in [^\n]*\.eqns")
    env = re.compile(r"\benv\b|\bvalues?\[v\]|\b_?read\(|write\(", re.MULTILINE)
    return [
        name
        for name, source in files.items()
        if name.startswith(("_program", "_update")) and loop.search(source) and env.search(source)
    ]


def figures(files: layers.Files) -> Iterator[tuple[str, str, str]]:
    """Name, value and definition of each figure."""
    circles = list(layers._circles(files))
    faults = [f for name in files for f in layers._import_faults(name, files)]
    inner = [f for f in faults if "inside of a function" in f]
    private = [f for f in faults if "private module" in f]
    yield (
        "circles; inner imports; private imports",
        f"{len(circles)}; {len(inner)}; {len(private)}",
        (
            "entries of a folder that import themselves; imports of jaxdist inside of functions; "
            "imports of a module that the `__init__` of its room does not list"
        ),
    )
    entries: dict[str, set[str]] = collections.defaultdict(set)
    for name in files:
        parts = name.split(".")
        for depth in range(1, len(parts)):
            entries[".".join(parts[:depth])].add(parts[depth])
    largest = max(entries, key=lambda folder: len(entries[folder]))
    yield (
        "entries of the largest folder",
        f"{len(entries[largest])} ({largest})",
        "modules and folders, `__init__` included, the root of the package aside",
    )
    used = importers(files)
    small = [
        name
        for name, source in files.items()
        if not name.endswith("__init__")
        and source.count("\n") < SMALL
        and len([u for u in used[name] if not u.endswith("__init__")]) <= 1
        and len(used[name]) == 1
    ]
    internal = [name for name in small if name.startswith("_") or "._" in name]
    documented = [name for name in small if name not in internal]
    yield (
        f"files under {SMALL} lines with one importer",
        (
            f"{len(internal)}: {', '.join(internal)}; and {len(documented)} that users import: "
            f"{', '.join(documented)}"
        ),
        "importers count when they are an `__init__`, too; users import names without underscore",
    )
    found = walkers(files)
    yield (
        "walkers with their own environment",
        f"{len(found)}: {', '.join(found)}",
        "files of _program and _update that loop over `.eqns` and keep values of variables",
    )
    code = sum(map(code_lines, files.values()))
    yield "lines of code", f"{code:,}", "without comments, docstrings and blanks"
    comments = sum(map(comment_lines, files.values()))
    yield "comments per 100 lines of code", f"{100 * comments / code:.1f}", "lines with a comment"
    names = [n for source in files.values() for n in _functions(source)]
    bad = [n for n in names if is_participle(n)]
    common = ", ".join(n for n, _ in collections.Counter(bad).most_common(12))
    yield (
        "functions named by a participle",
        f"{100 * len(bad) / len(names):.1f} % ({len(bad)} of {len(names)}: {common}, ...)",
        "the first word of the name ends in -ed, or is an irregular participle",
    )
    yield (
        "files to touch to add " + "; ".join(a.kind for a in ADDITIONS),
        "; ".join(str(len(a.files)) for a in ADDITIONS),
        "new and edited files of the package, in the additions of tools/additions, which work",
    )
    yield (
        "files; lines; longest file",
        f"{len(files)}; {sum(s.count(chr(10)) for s in files.values()):,}; "
        + max(files, key=lambda n: files[n].count("\n")),
        "all lines",
    )


def rooms(files: layers.Files) -> Iterator[tuple[str, int, int, int, int, str]]:
    """Each room: files, lines, rooms that use it, rooms that it uses, public names."""
    arrows = {
        (name.split(".")[0], layers._module(dotted, files).split(".")[0])
        for name, source in files.items()
        for dotted, _ in layers._imports(source)
        if dotted.startswith("jaxdist.")
    }
    for row in layers.ROWS:
        for room in sorted(row):
            own = {n: s for n, s in files.items() if n.split(".")[0] == room}
            face = files.get(f"{room}.__init__", files.get(room, ""))
            names = sum(
                isinstance(node, ast.ImportFrom) and len(node.names)
                for node in layers.late_block(ast.parse(face)) or ast.parse(face).body
            )
            public = str(names) if room in layers.PUBLIC else "-"
            yield (
                room,
                len(own),
                sum(s.count("\n") for s in own.values()),
                sum(b == room and a != room for a, b in arrows),
                sum(a == room and b != room for a, b in arrows),
                public,
            )


def _size(files: layers.Files) -> None:
    for name, value, definition in figures(files):
        print(f"{name}: {value}\n    {definition}")
    print("longest files:")
    for name in sorted(files, key=lambda n: -files[n].count("\n"))[:12]:
        print(f"    {files[name].count(chr(10)):5d} {name}")


def _map(files: layers.Files) -> None:
    print(f"{'room':18} {'files':>5} {'lines':>6} {'used by':>7} {'uses':>5} {'public names':>12}")
    for room, number, lines, used_by, uses, public in rooms(files):
        print(f"{room:18} {number:5} {lines:6} {used_by:7} {uses:5} {public:>12}")


def main() -> None:
    """Print what the first argument asks for: `size` or `map`."""
    commands: dict[str, Callable[[layers.Files], None]] = {"size": _size, "map": _map}
    asked = sys.argv[1] if len(sys.argv) > 1 else "size"
    if asked not in commands:
        sys.exit(f"python -m tools.figures {asked}: ask for one of {', '.join(commands)}")
    commands[asked](layers._files())


if __name__ == "__main__":
    main()
