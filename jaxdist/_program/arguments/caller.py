"""The stack level of the user's line, for warnings."""

import sys

from jaxdist import _compat


def user_stack_level() -> int:
    """Return the `stacklevel` with which a warning of the caller shows the user's own line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_compat.PACKAGE):
        frame = frame.f_back
        level += 1
    return level
