"""Names of earlier versions of `tf.distribute`."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.compat import v1 as v1

_open_late(__name__)
