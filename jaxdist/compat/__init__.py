"""Names of earlier versions."""

from jaxdist.compat import v1 as v1
