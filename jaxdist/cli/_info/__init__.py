"""`jaxdist info`: this machine; and `jaxdist chips`: the table of chips."""

from jaxdist.cli._info.chips import show_chips as show_chips
from jaxdist.cli._info.show import show_info as show_info
