"""Functions of higher rooms that a lower room calls."""

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Hook(Generic[F]):
    """A function of a higher room, which is imported when the function is called.

    Imports run downward only, so a lower room cannot import the function that it needs. Nobody
    sets a hook: what a lower room does never depends on which rooms a program has used before.

    Args:
        room: The room that has the function.
        name: The name of the function there.
    """

    def __init__(self, room: str, name: str) -> None:
        self.room = room
        self.name = name
        # After the first call the function itself, so that a call of it is one call.
        self.call: F = self._open  # type: ignore[assignment]

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self.call = getattr(importlib.import_module(self.room), self.name)
        return self.call(*args, **kwargs)


# Compiles a program of a strategy for another machine; `Program.compile_for` calls it.
COMPILE_FOR = Hook[Callable[..., Any]]("jaxdist._planning", "compile_for")
# Called when a strategy is made, so that models of Keras know of strategies.
MAKE_STRATEGY = Hook[Callable[[], None]]("jaxdist._keras", "change_keras")
# Makes the train, test or predict function of a Keras model whose variables are on servers.
MAKE_SERVER_FUNCTION = Hook[Callable[[Any, Any, str], Any]](
    "jaxdist._keras_servers", "make_function"
)
# Returns the `_values.CallContext` of the caller: the current strategy, and the step around it.
GET_CALL_CONTEXT = Hook[Callable[[], Any]]("jaxdist._replica", "find_call_context")
# Returns the path, the role, the value and a setter of each variable of an object of Keras;
# `partition.place` calls it with the strategy, the object, and the variables that it has seen.
KERAS_VARIABLES = Hook[Callable[..., list[tuple[str, str, Any, Callable[[Any], None]]]]](
    "jaxdist._keras", "list_for_rules"
)
