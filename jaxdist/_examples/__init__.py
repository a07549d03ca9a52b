"""Finds and copies the configurations and notebooks that come with jaxdist."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._examples.find import copy_examples as copy_examples
    from jaxdist._examples.find import find_config as find_config
    from jaxdist._examples.find import list_configs as list_configs
    from jaxdist._examples.find import list_notebooks as list_notebooks

_open_late(__name__)
