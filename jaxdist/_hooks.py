"""Hooks through which a room calls functions of higher rooms."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jaxdist.errors import ContextError

F = TypeVar("F", bound=Callable[..., Any])


class Hook(Generic[F]):
    """A slot for one function of a higher room, which sets it when it is imported.

    Imports run downward only, so a lower room cannot import the function that it needs.

    Args:
        provider: The room that provides the function.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        # Store the function itself, so that calling it costs only one call.
        self.call: F = self._refuse  # type: ignore[assignment]

    def set(self, function: F) -> None:
        """Set the function."""
        self.call = function

    def _refuse(self, *_: Any, **__: Any) -> Any:
        # This happens only while jaxdist is being imported: its `__init__` imports every provider.
        raise ContextError(
            f"{self._provider} was not imported.\n\nA room below it calls what it provides.\n\n"
            "Import jaxdist as a whole: import jaxdist."
        )


# Compiles a program of a strategy for another machine; `Program.compile_for` calls it.
COMPILE_FOR = Hook[Callable[..., Any]]("jaxdist._planning")
# Called when a strategy is made, so that Keras models work with strategies.
MAKE_STRATEGY = Hook[Callable[[], None]]("jaxdist._keras")
# Makes the train, test or predict function of a Keras model whose variables are on servers.
MAKE_SERVER_FUNCTION = Hook[Callable[[Any, Any, str], Any]]("jaxdist._keras_servers")
# Returns the `_values.CallContext` of the caller: the current strategy, and the step around it.
GET_CALL_CONTEXT = Hook[Callable[[], Any]]("jaxdist._replica")
# Returns the path, the role, the value and a setter of each variable of a Keras object;
# `partition.place` calls it with the strategy, the object, and the variables that it has seen.
KERAS_VARIABLES = Hook[Callable[..., list[tuple[str, str, Any, Callable[[Any], None]]]]](
    "jaxdist._keras"
)
