"""Functions that a room calls and a room above it provides."""

from collections.abc import Callable
from typing import Any

from jaxdist.errors import ContextError


class Hook:
    """A place for one function of a higher room; it is filled when that room is imported.

    Args:
        provider: The room that provides the function.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._function: Callable[..., Any] | None = None

    def set(self, function: Callable[..., Any]) -> None:
        """Provide the function."""
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self._function is None:
            raise ContextError(
                f"{self._provider} was not imported.\n\nA room below it calls what it provides.\n\n"
                "Import jaxdist as a whole: import jaxdist."
            )
        return self._function(*args, **kwargs)


# Plans a program of a strategy for another machine.
COMPILE_FOR = Hook("jaxdist._planning")
