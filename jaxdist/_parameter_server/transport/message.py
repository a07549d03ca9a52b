"""`Message`: what one task sends to another; and the two ends of a connection."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxdist._called import refuse_type

# A reply repeats the name, also beside the text of an error.
LONGEST_METHOD = 500
_OF_NUMPY = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


@dataclasses.dataclass(frozen=True)
class Message:
    """A request or a reply: a name, values that JSON can hold, and arrays.

    Arrays that are received may be read-only, and in one process they are the sender's own arrays,
    so neither side writes into them.

    Args:
        method: The name of the method that is called; a reply repeats it.
        fields: Numbers, strings, None, lists and dicts with strings as keys.
        arrays: NumPy arrays of fixed-size dtypes, bfloat16 and its like included.
    """

    method: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


@functools.cache
def get_dtypes() -> dict[str, np.dtype]:
    """Return the dtypes of numbers that have the same bytes on every machine, by name."""
    found = {name: np.dtype(name) for name in _OF_NUMPY}
    for name in dir(ml_dtypes):
        kind = getattr(ml_dtypes, name)
        if isinstance(kind, type) and issubclass(kind, np.generic):
            found[name] = np.dtype(kind)
    return found


@functools.cache
def get_names() -> dict[np.dtype, str]:
    """Return the names of these dtypes. A dtype of the other byte order is not one of them."""
    return {dtype: name for name, dtype in get_dtypes().items()}


def get_plain(array: np.ndarray) -> np.ndarray:
    """Return an array as a message holds it: contiguous, and little-endian.

    Raises:
        ArgumentTypeError: Its dtype is not one of `get_dtypes`.
    """
    # For a hundred small arrays, looking up the names of their dtypes would take the most time.
    if type(array) is np.ndarray and array.dtype in get_names() and array.flags.c_contiguous:
        return array
    native = array.dtype.newbyteorder("=")
    if native not in get_names():
        raise refuse_type(
            f"a message with an array of dtype {array.dtype}.",
            "A message holds numbers whose bytes mean the same on every machine: bool, integers, "
            "floats up to 64 bits, complex numbers of two of those, and the dtypes of ml_dtypes.",
            "Convert it, for instance by array.astype('float32').",
        )
    # A subclass, such as a matrix, becomes a plain array. A 0-d array stays one.
    return np.asarray(array, dtype=native, order="C")


# Called in threads of the server, several at a time.
Handler = Callable[[Message], Message]


class Channel(Protocol):
    """The caller's side of a connection. Several threads may call at a time."""

    @property
    def address(self) -> str:
        """The address of the other task, such as `10.0.0.2:2222`."""
        ...

    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Call a method of the other task, and return its reply.

        Args:
            message: The request.
            seconds: How long to wait for the reply; None means `JAXDIST_RPC_SECONDS` (60).

        Raises:
            DeadlineExceededError: No reply arrived in time. The other task may have done the work.
            UnavailableError: Nobody listens there, or the connection was lost.
            UnauthenticatedError: The other task has another secret.
            ProgramMismatchError: The other task has a version of jaxdist with other messages.
            ArgumentError, ArgumentTypeError: A message cannot hold this, or is too large.
            JaxdistError: What the other task raised. `UnknownError` for any other error.
        """
        ...

    def call_briefly(self, message: Message, seconds: float | None = None) -> Message | None:
        """Call a method whose reply is most likely small: by gRPC in half the time of `call`.

        Returns:
            The reply; None if it is too long for one chunk. The other task has done the work then,
            and the caller asks for the result by `call`.

        Raises:
            JaxdistError: As from `call`.
        """
        ...

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until the other task answers, for instance because it is just being started.

        Args:
            seconds: How long; None means `JAXDIST_RPC_SECONDS` (60).

        Raises:
            DeadlineExceededError: It did not answer in time.
            UnavailableError: This channel is closed.
        """
        ...

    def close(self) -> None:
        """Close the connection; calls that wait raise `UnavailableError`."""
        ...


class Listener(Protocol):
    """The other side: a task that answers."""

    @property
    def address(self) -> str:
        """The address that it listens on, with the real port if port 0 was requested."""
        ...

    def stop(self) -> None:
        """Stop answering, and free the address."""
        ...
