"""A callback for every variable of Flax NNX that is made in a block."""

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flax import nnx

from jaxdist._compat.tracing import set_in_block

# Called with the variable's class, and the names of the outermost module whose `__init__` runs and
# of its class; None outside of modules.
Watcher = Callable[[type, str | None], None]

_WATCHER: ContextVar[Watcher | None] = ContextVar("jaxdist_made_variables", default=None)


def watch_made_variables(watcher: Watcher | None) -> contextlib.AbstractContextManager[None]:
    """Call a function for each NNX variable that is constructed in a block.

    Variables that `nnx.merge`, `nnx.clone` and the transformations of NNX build from existing ones
    are not constructed.
    """
    _install()
    return set_in_block(_WATCHER, watcher)


@functools.cache
def _install() -> None:
    # Flax has no callback for this.
    initialize = nnx.Variable.__init__

    @functools.wraps(initialize)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        watcher = _WATCHER.get()
        if watcher is not None:
            watcher(type(self), _find_module(sys._getframe(1)))
        initialize(self, *args, **kwargs)

    nnx.Variable.__init__ = watched  # type: ignore[method-assign]


def _find_module(frame: types.FrameType | None) -> str | None:
    """Return the class of the outermost NNX module that is being made."""
    found = None
    while frame is not None:
        own = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        found = type(own).__name__ if isinstance(own, nnx.Module) else found
        frame = frame.f_back
    return found
