"""Names of earlier versions of `tf.distribute`."""

from jaxdist.compat import v1 as v1
