"""The model of a strategy whose `fit`, `evaluate` or `predict` runs."""

import contextlib
from contextvars import ContextVar
from typing import Any

from jaxdist import _compat

_MODEL: ContextVar[Any] = ContextVar("jaxdist_keras_model", default=None)


def current_model() -> Any:
    """Return the model that trains or evaluates now on a strategy, or None."""
    return _MODEL.get()


def use_model(model: Any) -> contextlib.AbstractContextManager[None]:
    """Make this the current model in a block."""
    return _compat.set_in_block(_MODEL, model)
