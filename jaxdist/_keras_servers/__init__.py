"""Trains Keras models whose variables are on parameter servers. Does not import Keras itself."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._keras_servers.functions import make_function as make_function
    from jaxdist._keras_servers.optimizer import make_transformation as make_transformation

_open_late(__name__)
