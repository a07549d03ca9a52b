"""The stack level of the user's line, for warnings."""

import sys

from jaxdist import _compat


def user_stack_level() -> int:
    """Return the `stacklevel` that makes a warning from the caller show the user's line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_compat.PACKAGE):
        frame = frame.f_back
        level += 1
    return level
