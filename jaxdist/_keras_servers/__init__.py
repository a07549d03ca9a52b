"""Trains Keras models whose variables are on parameter servers. Does not import Keras itself."""

from jaxdist._hooks import MAKE_SERVER_FUNCTION as _MAKE_SERVER_FUNCTION
from jaxdist._keras_servers.functions import make_function as _make_function
from jaxdist._keras_servers.transformation import make_transformation as make_transformation

_MAKE_SERVER_FUNCTION.set(_make_function)
