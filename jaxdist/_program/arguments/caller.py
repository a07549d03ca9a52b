"""Where a warning should point."""

import os
import sys

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def user_stack_level() -> int:
    """The `stacklevel` with which a warning of the caller points at the user's own line."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level += 1
    return level
