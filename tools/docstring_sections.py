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


class DocstringSections(_EXTENSION):
    """Rename sections of docstrings to names that griffe knows, and show names of rooms."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of one object.

        Args:
            obj: What griffe has read: a module, class, function or attribute.
            **_: What else griffe passes.
        """
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            sentence = r"^( *)Raises:\n(?! *\w+:)"
            obj.docstring.value = re.sub(sentence, r"\1Errors:\n", text, flags=re.M)

    def on_alias_instance(self, *, alias: Any, **_: Any) -> None:
        """Note that an imported name exists at run time.

        Args:
            alias: The name, as griffe has read it.
            **_: What else griffe passes.
        """
        alias.runtime = True
