"""Status codes: the numbers of gRPC, which are also those of TensorFlow."""

import logging

from jaxdist._validate import show
from jaxdist.errors import (
    CancelledError,
    ContextError,
    DeadlineExceededError,
    InvalidArgumentError,
    JaxdistError,
    NotFoundError,
    OutOfRangeError,
    ProgramMismatchError,
    UnauthenticatedError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)

_LOG = logging.getLogger("jaxdist")
OK, UNKNOWN, INVALID_ARGUMENT = 0, 2, 3
# The first class that fits; every other error of jaxdist is of a built-in class of _BUILT_IN.
_CODES: tuple[tuple[type[JaxdistError], int], ...] = (
    (CancelledError, 1),
    (DeadlineExceededError, 4),
    (NotFoundError, 5),
    (ProgramMismatchError, 9),
    (ContextError, 9),
    (OutOfRangeError, 11),
    (UnsupportedError, 12),
    (UnavailableError, 14),
    (UnauthenticatedError, 16),
)
# The classes that TensorFlow's `py_function` gives to errors of Python.
_BUILT_IN: tuple[tuple[type[Exception], type[JaxdistError]], ...] = (
    (NotImplementedError, UnsupportedError),
    (TypeError, InvalidArgumentError),
    (ValueError, InvalidArgumentError),
    (StopIteration, OutOfRangeError),
)


def get_code(error: JaxdistError) -> int:
    """Return the status code of an error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError)) else UNKNOWN


def as_own_error(method: str, error: BaseException) -> JaxdistError:
    """Return an error of a registered function as one that can be sent; log its traceback."""
    if isinstance(error, JaxdistError):
        return error
    _LOG.error("The function of %r raised:", method, exc_info=error)
    kind = next((own for built_in, own in _BUILT_IN if isinstance(error, built_in)), UnknownError)
    return kind(
        f"The function of {method!r} raised {show(error)}.\n\n"
        "The server answers with the error of its function, and goes on.\n\n"
        "Its log has the traceback."
    )
