"""Documented names under `tf.compat.v1.tpu`: each says what is in its place."""

from jaxdist._not_there import explain_missing as _explain_missing

_explain_missing(__name__)
