"""Documented names under `tf.distribute.experimental`."""

from jaxdist.data import ValueContext as ValueContext
