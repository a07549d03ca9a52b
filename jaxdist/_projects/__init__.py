"""Writes a project that runs at once, for `jaxdist new`."""

from jaxdist._projects.write import write_project as write_project
