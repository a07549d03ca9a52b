"""A project that runs at once: what `jaxdist new` writes."""

from jaxdist._projects.write import write_project as write_project
