"""Callbacks that a room calls and that a higher room provides."""

from collections.abc import Callable
from typing import Any

from jaxdist.errors import ContextError


class Hook:
    """A slot for one function of a higher room, which sets it when it is imported.

    Imports run downward only, so a lower room cannot import the function that it needs.

    Args:
        provider: The room that provides the function.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._function: Callable[..., Any] | None = None

    def set(self, function: Callable[..., Any]) -> None:
        """Set the function."""
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        # Only while jaxdist itself is imported: its `__init__` imports every provider.
        if self._function is None:
            raise ContextError(
                f"{self._provider} was not imported.\n\nA room below it calls what it provides.\n\n"
                "Import jaxdist as a whole: import jaxdist."
            )
        return self._function(*args, **kwargs)


# Compiles a program of a strategy for another machine; `Program.compile_for` calls it.
COMPILE_FOR = Hook("jaxdist._planning")
