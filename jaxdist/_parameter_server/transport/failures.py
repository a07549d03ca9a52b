"""Errors of a handler, as the caller gets them."""

import inspect

import msgspec

from jaxdist import errors
from jaxdist.errors import JaxdistError, OtherProcessError, UnknownError

_CLASSES: dict[str, type[JaxdistError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, JaxdistError)
}


class Failure(msgspec.Struct, array_like=True):
    """An error, without what could be a program: its class by name, and its text."""

    name: str
    text: str
    processes: list[int]


def describe_failure(error: BaseException, method: str) -> Failure:
    """Return an error as values that can be sent.

    A class that is not in `jaxdist.errors` counts as its base class there. What is no error of
    jaxdist at all is told by its class and text. The places of its traceback stay here.
    """
    if isinstance(error, JaxdistError):
        name = next(k.__name__ for k in type(error).__mro__ if _CLASSES.get(k.__name__) is k)
        processes = error.processes if isinstance(error, OtherProcessError) else ()
        return Failure(name, _get_text(error), list(processes))
    text = (
        f"{method} raised {type(error).__name__}: {_get_text(error)}\n\n"
        "The other task answers with the error of its function, and goes on.\n\n"
        "Its log has the traceback."
    )
    return Failure("UnknownError", text, [])


def make_error(failure: Failure) -> JaxdistError:
    """Return the error that a failure describes."""
    kind = _CLASSES.get(failure.name)
    if kind is None:
        # Of a later version of jaxdist.
        return UnknownError(f"{failure.name}: {failure.text}")
    if issubclass(kind, OtherProcessError):
        return kind(failure.text, failure.processes)
    return kind(failure.text)


def _get_text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = object.__repr__(error)
    # It is part of a header, which has a limit; and msgspec encodes no half of a surrogate pair.
    return text[:20_000].encode(errors="replace").decode()
