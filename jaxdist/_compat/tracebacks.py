"""Frames of jaxdist in tracebacks: hidden as JAX hides its own."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax._src import traceback_util as _traceback_util

from jaxdist._compat.sources import PACKAGE

F = TypeVar("F", bound=Callable[..., Any])

_traceback_util.register_exclusion(PACKAGE.rstrip(os.sep))

_NOTE = (
    "--------------------\nFor simplicity, jaxdist and JAX have removed their internal frames from "
    "the traceback of this exception. Set JAX_TRACEBACK_FILTERING=off to include these."
)


def hide_frames(error: BaseException) -> None:
    """Take the frames of jaxdist and JAX out of the traceback of an exception on its way out.

    Follows `jax_traceback_filtering`, as JAX's own functions do. Below one of those, or of ours,
    the outermost does it. Waits for a public way to register frames.
    """
    mode = _traceback_util._filtering_mode()
    if mode == "off" or _traceback_util._is_under_reraiser(error):
        return
    traceback = error.__traceback__
    if mode == "tracebackhide":
        _traceback_util._add_tracebackhide_to_hidden_frames(traceback)
    elif traceback is not None:
        error.with_traceback(_traceback_util.filter_traceback(traceback))
        # JAX has left the same note where the error came through one of its functions.
        notes = getattr(error, "__notes__", [])
        if mode == "quiet_remove_frames" and not any("internal frames" in n for n in notes):
            # What is said of the exception itself is read last.
            error.__notes__ = [_NOTE, *notes]


def hides_frames(fn: F) -> F:
    """A function whose exceptions come without the frames of jaxdist and JAX."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return cast(F, called)
