"""What a connection between two tasks can do, in one process and by gRPC."""

from collections.abc import Callable
from typing import Protocol

from jaxdist._parameter_server.transport.message import Message

# Called in a thread of the server, several at a time.
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
            DeadlineExceededError: No reply came in time. The other task may have done the work.
            UnavailableError: Nobody listens there, or the connection was lost.
            UnauthenticatedError: The other task has another secret.
            ProgramMismatchError: The other task is of a version of jaxdist with other messages.
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
        """The address that it listens on, with the real port where port 0 was asked for."""
        ...

    def stop(self) -> None:
        """Stop to answer, and free the address."""
        ...
