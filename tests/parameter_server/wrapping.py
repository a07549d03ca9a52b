"""Looking at, delaying and losing requests of one kind, on their way to a server."""

from collections.abc import Callable
from typing import Any


def wrap(
    call: Callable[..., Any], kind: type[Any], around: Callable[[Any, Callable[[], Any]], Any]
) -> Callable[..., Any]:
    """Return the `call` of a server, or of the class of servers, with something around it.

    Args:
        call: The method.
        kind: The requests that it concerns.
        around: Gets a request and a function that sends it, and returns the reply.
    """

    def wrapped(*given: Any) -> Any:
        def go_on() -> Any:
            return call(*given)

        return around(given[-1], go_on) if isinstance(given[-1], kind) else go_on()

    return wrapped
