"""Shared by both layers: deadlines of calls, errors that name the task, and handlers.

An error of a handler is sent as the name of its class and its text.
"""

import inspect
import logging
import time
from collections.abc import Mapping

import msgspec

from jaxdist import errors
from jaxdist._parameter_server.transport.message import Handler, Message
from jaxdist._processes import get_settings

_CLASSES: dict[str, type[errors.JaxdistError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.JaxdistError)
}
_LOG = logging.getLogger("jaxdist")
# The most that gRPC and locks take.
_LONGEST = 1e8


class Failure(msgspec.Struct, array_like=True):
    """An error as data, without a program in it: the name of its class, and its text."""

    name: str
    text: str
    processes: list[int]


def describe_failure(error: BaseException, method: str) -> Failure:
    """Return an error as values that can be sent.

    A class that is not in `jaxdist.errors` counts as its base class there. Other errors are sent as
    class name and message. Its traceback stays here.
    """
    if isinstance(error, errors.JaxdistError):
        name = next(k.__name__ for k in type(error).__mro__ if _CLASSES.get(k.__name__) is k)
        processes = error.processes if isinstance(error, errors.OtherProcessError) else ()
        return Failure(name, _get_text(error), list(processes))
    text = (
        f"{method} raised {type(error).__name__}: {_get_text(error)}\n\n"
        "The other task answers with the error of its function, and continues.\n\n"
        "Its log has the traceback."
    )
    return Failure("UnknownError", text, [])


def make_error(failure: Failure) -> errors.JaxdistError:
    """Return the error that a failure describes."""
    kind = _CLASSES.get(failure.name)
    if kind is None:
        # A class of a later version of jaxdist.
        return errors.UnknownError(f"{failure.name}: {failure.text}")
    if issubclass(kind, errors.OtherProcessError):
        return kind(failure.text, failure.processes)
    return kind(failure.text)


def _get_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = object.__repr__(error)
    # It is part of a header, which has a limit; msgspec cannot encode half of a surrogate pair.
    return text[:20_000].encode(errors="replace").decode()


class Peer:
    """The other task, for errors: where it is, and when it was last heard of.

    Args:
        name: Such as `ps 0`.
        address: Its address.
    """

    def __init__(self, name: str, address: str) -> None:
        self._name = f"{name} at {address}" if name else address
        self._since = time.monotonic()
        self._has_answered = False

    def __str__(self) -> str:
        return self._name

    def note_answer(self) -> None:
        """Remember that it has answered now."""
        self._since = time.monotonic()
        self._has_answered = True

    def make_unavailable(self, method: str, why: str) -> errors.UnavailableError:
        """Return the error of a call that found no task, or lost the connection."""
        return errors.UnavailableError(
            f"{self._name} is not available: {why}.\n\n"
            f"It was called with {method!r}. {self._tell_since()}\n\n"
            "Call again when the task has been started again; the same channel finds it. The task "
            "may have done the work of a call that was under way."
        )

    def make_deadline(
        self, method: str, seconds: float, said: str = ""
    ) -> errors.DeadlineExceededError:
        """Return the error of a call without a reply in time.

        Args:
            method: The method that was called.
            seconds: The time.
            said: What answered instead, such as a proxy.
        """
        instead = f" The reply from there was: {said}." if said else ""
        return errors.DeadlineExceededError(
            f"{self._name} did not reply within {seconds:g} s.{instead}\n\n"
            f"It was called with {method!r}. {self._tell_since()} The task may have done the work."
            "\n\nCheck whether it hangs or has stopped. To wait longer, pass seconds= or set "
            "JAXDIST_RPC_SECONDS."
        )

    def _tell_since(self) -> str:
        seconds = time.monotonic() - self._since
        if self._has_answered:
            return f"It last answered {seconds:.1f} s ago."
        return f"It has not answered since this channel was made {seconds:.1f} s ago."


def get_seconds(seconds: float | None) -> float:
    """Return how long a call may take; the default is `JAXDIST_RPC_SECONDS`."""
    return min(get_settings().rpc_seconds if seconds is None else seconds, _LONGEST)


def answer(handlers: Mapping[str, Handler], request: Message) -> tuple[Message, Failure | None]:
    """Call the handler of a request; what it raises is part of the answer."""
    method = request.method
    try:
        if (handler := handlers.get(method)) is None:
            raise errors.NotFoundError(
                f"This task was called with {method[:80]!r}, which it does not have.\n\n"
                f"Its methods are {sorted(handlers)}.\n\n"
                "Call one of these, or the task that has the method."
            )
        return handler(request), None
    # Also SystemExit: otherwise the caller would wait until its deadline.
    except BaseException as error:
        if not isinstance(error, errors.JaxdistError):
            _LOG.exception("The handler of %r raised:", method)
        return Message(method), describe_failure(error, method)
