"""The pages of the API reference: one for each public module, with each of its names.

Modules are read and never imported, so the site is built without JAX.
"""

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from tests.test_layers import late_block
from tools import api_order

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "jaxdist"
# The command has no names that a program imports.
LEFT_OUT = {"jaxdist.cli"}


@dataclasses.dataclass(frozen=True)
class Name:
    """A public name of a module, and the first public name of the same object."""

    module: str
    name: str
    first: str

    @property
    def path(self) -> str:
        """The name that users type."""
        return f"{self.module}.{self.name}"


def _file_of(module: str) -> pathlib.Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


@functools.cache
def _parse(module: str) -> ast.Module:
    return ast.parse(_file_of(module).read_text())


def _put_first(names: Iterable[str], first: Sequence[str]) -> list[str]:
    """Return the names in the order of `first`, and then the others in their own order."""
    places = {name: place for place, name in enumerate(first)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def list_modules() -> list[str]:
    """All public modules, in the order of the menu."""
    found = {PACKAGE}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found.add(".".join(parts))
    return _put_first(sorted(found - LEFT_OUT), api_order.MODULES)


def _read_all(body: list[ast.stmt]) -> list[str]:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _read_statements(module: str) -> list[ast.stmt]:
    """The statements of a module, with those of its names that are imported late."""
    tree = _parse(module)
    return [*tree.body, *late_block(tree)]


def _read_names(module: str) -> Iterator[tuple[str, str]]:
    """Each name of a module, and the module that it comes from."""
    for node in _read_statements(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, module
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target), module
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name == "*":
                    source = _parse(node.module).body
                    yield from ((name, node.module) for name in _read_all(source))
                elif alias.name == alias.asname:
                    yield alias.name, node.module


def _find_definition(module: str, name: str) -> str:
    """Follow the imports of a name to the module that defines it."""
    if not _file_of(module).exists():
        return f"{module}.{name}"
    sources = dict(_read_names(module))
    for node in _read_statements(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            sources |= {a.asname or a.name: node.module for a in node.names if a.name == name}
    source = sources.get(name, module)
    return f"{module}.{name}" if source == module else _find_definition(source, name)


@functools.cache
def list_names() -> tuple[Name, ...]:
    """Every public name of every public module, except modules and hidden names.

    A name that several modules have belongs to the first of them in the alphabet.
    """
    modules = sorted(list_modules())
    first: dict[str, str] = {}
    found: list[Name] = []
    for module in modules:
        for name, source in _read_names(module):
            path = f"{module}.{name}"
            if name.startswith("_") or path in modules or f"{source}.{name}" in modules:
                continue
            if name in api_order.HIDDEN.get(module, ()):
                continue
            found.append(Name(module, name, first.setdefault(_find_definition(source, name), path)))
    return tuple(found)


def _write_entry(path: str) -> str:
    """The entry of a name, without members that only jaxdist calls."""
    hidden = api_order.HIDDEN.get(path, ())
    filters = ", ".join(f'"{one}"' for one in ("!^_", *(f"!^{name}$" for name in hidden)))
    return f"::: {path}" + (f"\n    options:\n      filters: [{filters}]" if hidden else "")


def write_page(module: str) -> str:
    """The page of one module, in the Markdown of mkdocstrings."""
    by_name = {name.name: name for name in list_names() if name.module == module}
    own = [by_name[name] for name in _put_first(by_name, api_order.FIRST.get(module, ()))]
    about = ast.get_docstring(_parse(module)) or ""
    summary = about.partition("\n\n")[0].replace("\n", " ")
    same = [f"- `{n.path}` is [`{n.first}`][{n.first}]" for n in own if n.first != n.path]
    parts = [f"# {module}", summary, *(_write_entry(n.path) for n in own if n.first == n.path)]
    if same:
        parts += ["## Names of objects of other modules", "\n".join(same)]
    return "\n\n".join(parts) + "\n"
