"""Where a warning should point."""

import sys

from jaxdist import _compat


def user_stack_level() -> int:
    """The `stacklevel` with which a warning of the caller points at the user's own line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_compat.PACKAGE):
        frame = frame.f_back
        level += 1
    return level
