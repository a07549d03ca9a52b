"""Keras models that train on the replicas of a strategy; without Keras, nothing is imported."""

from jaxdist._hooks import MAKE_STRATEGY as _MAKE_STRATEGY
from jaxdist._keras.on_import import change_keras as _change_keras

_MAKE_STRATEGY.set(_change_keras)
