"""A griffe extension: what griffe would not show as it is meant.

griffe takes what is imported under `if TYPE_CHECKING:` for absent at run time. Rooms list their
names there, and `jaxdist/_late.py` imports them when they are read.

griffe shows `Examples:` as code and `Example:`, which jaxdist writes, as a plain box. Each line of
`Raises:` has to begin with a class, and a few begin with a sentence about another function.
`mkdocs.yml` names this file. griffe is no dependency, so it is imported by name here.
"""

import importlib
import re
from typing import Any

_EXTENSION: Any = importlib.import_module("griffe").Extension
_RAISES = re.compile(r"^( *)Raises:\n((?:\1 +.*\n?|\n)+)", re.M)


def rename_sections(text: str) -> str:
    """Return a docstring with the names of sections that griffe knows.

    Args:
        text: The docstring, as jaxdist writes it.
    """
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
    return _RAISES.sub(_keep_or_rename, text)


def _keep_or_rename(section: re.Match[str]) -> str:
    """Keep a section whose items all begin with a class, and rename one with a sentence."""
    lines = [line for line in section[2].splitlines() if line.strip()]
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    items = [line[indent:] for line in lines if line[indent] != " "]
    if all(re.match(r"[\w.]+:", item) for item in items):
        return section[0]
    return section[0].replace("Raises:", "Errors:", 1)


class DocstringSections(_EXTENSION):
    """Rename sections of docstrings to names that griffe knows, and show names of rooms."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of one object.

        Args:
            obj: What griffe has read: a module, class, function or attribute.
            **_: What else griffe passes.
        """
        if obj.docstring is not None:
            obj.docstring.value = rename_sections(obj.docstring.value)

    def on_alias_instance(self, *, alias: Any, **_: Any) -> None:
        """Note that an imported name exists at run time.

        Args:
            alias: The name, as griffe has read it.
            **_: What else griffe passes.
        """
        alias.runtime = True
