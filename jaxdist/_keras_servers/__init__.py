"""Trains Keras models with variables on parameter servers. Importing it does not import Keras."""

from jaxdist._hooks import MAKE_SERVER_FUNCTION as _MAKE_SERVER_FUNCTION
from jaxdist._keras_servers.functions import make_function as _make_function
from jaxdist._keras_servers.transformation import make_transformation as make_transformation

_MAKE_SERVER_FUNCTION.set(_make_function)
