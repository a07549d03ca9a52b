"""Finds mistakes that the guides warn about in programs, without running them."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._lint.finding import UNREADABLE as UNREADABLE
    from jaxdist._lint.finding import Finding as Finding
    from jaxdist._lint.finding import Rule as Rule
    from jaxdist._lint.finding import Spell as Spell
    from jaxdist._lint.lint import Located as Located
    from jaxdist._lint.lint import lint_paths as lint_paths
    from jaxdist._lint.lint import lint_text as lint_text
    from jaxdist._lint.rules import RULES as RULES

_open_late(__name__)
