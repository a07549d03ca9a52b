"""Names of a room that are imported when they are read, not when the room is imported.

A room lists its names as import statements in a block `if TYPE_CHECKING:`, and calls `open_late`.
Type checkers and the documentation read the block. Python does not run it: the module gets a
`__getattr__` that imports a name when it is read for the first time.
"""

import dis
import importlib
import importlib.util
import sys
from types import CodeType
from typing import Any


def open_late(room: str) -> None:
    """Import the names of the calling module when they are read.

    Args:
        room: The `__name__` of the calling module.
    """
    module = sys.modules[room]
    has = vars(module)
    listed, stars = _read_imports(sys._getframe(1).f_code)
    names = {name: place for name, place in listed.items() if name not in has}

    def list_names() -> list[str]:
        for source in stars:
            names.update((n, (source, n)) for n in importlib.import_module(source).__all__)
        stars.clear()
        return sorted((has.keys() | names.keys()) - {"TYPE_CHECKING"})

    def read(name: str) -> Any:
        if name == "__all__":
            list_names()
            return [n for n in names if not n.startswith("_")]
        # Python and other programs look for many names with two underscores.
        if not name.startswith("__"):
            if name not in names:
                list_names()
            if name in names:
                value = has[name] = _import(room, *names[name])
                return value
            if "__path__" in has and importlib.util.find_spec(f"{room}.{name}") is not None:
                return importlib.import_module(f"{room}.{name}")
        raise AttributeError(f"module {room!r} has no attribute {name!r}", name=name, obj=module)

    # Set by name, not by `def`: a type checker accepts every name of a module that defines it.
    has.update(__getattr__=read, __dir__=list_names)


def _read_imports(code: CodeType) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return what the import statements of a module would do.

    The code is read, not the source: a program can be shipped without its sources.

    Args:
        code: The code of the module.

    Returns:
        For each name the module that has it and its name there, and the modules all of whose
        names are imported.
    """
    names: dict[str, tuple[str, str]] = {}
    stars: list[str] = []
    constant: Any = None
    source = ""
    place: tuple[str, str] | None = None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_CONST":
            constant = step.argval
        elif step.opname == "IMPORT_NAME":
            source = step.argval
            if constant == ("*",):
                stars.append(source)
        elif step.opname == "IMPORT_FROM":
            place = source, step.argval
        elif step.opname == "LOAD_NAME":  # the right side of `OldName = Name`
            place = names.get(step.argval)
        elif step.opname == "STORE_NAME" and place is not None:
            names[step.argval] = place
            place = None
    return names, stars


def _import(room: str, source: str, name: str) -> Any:
    if source == room:
        return importlib.import_module(f"{room}.{name}")
    module = importlib.import_module(source)
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{source}.{name}")
