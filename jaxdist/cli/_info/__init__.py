"""`jaxdist info`: describes this machine; and `jaxdist chips`: prints the table of chips."""

from jaxdist.cli._info.chips import show_chips as show_chips
from jaxdist.cli._info.show import show_info as show_info
