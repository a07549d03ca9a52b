"""Documented names under `tf.compat.v1.tpu`: each raises an error that names its replacement."""

from jaxdist._not_there import explain_missing as _explain_missing

_explain_missing(__name__)
