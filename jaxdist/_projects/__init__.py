"""Writes a project that runs at once, for `jaxdist new`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._projects.write import write_project as write_project

_open_late(__name__)
