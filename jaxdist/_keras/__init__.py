"""Keras models that train on the replicas of a strategy; without Keras, nothing is imported."""

from jaxdist._hooks import ENTER_SCOPE as _ENTER_SCOPE
from jaxdist._keras.on_import import enter_scope as _enter_scope

_ENTER_SCOPE.set(_enter_scope)
