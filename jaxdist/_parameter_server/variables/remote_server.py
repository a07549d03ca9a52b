"""`Link`: a parameter server as other tasks use it; and `RemoteServer`, one in another process."""

import secrets
from typing import Protocol

import msgspec

from jaxdist._parameter_server.protocol import (
    Hello,
    LongRequest,
    Pending,
    ServerInfo,
    WaitForCall,
    Waiting,
)
from jaxdist._parameter_server.transport import Channel, Message
from jaxdist._parameter_server.transport.requests import (
    R,
    Request,
    get_reply_kind,
    make_message,
    read_reply,
)
from jaxdist._processes import get_settings
from jaxdist.errors import NotFoundError, PSUnavailableError, UnavailableError

# How long a server may work before it says that it still does.
_LONGEST_WAIT = 10.0
# The least that is expected of a network, for messages that hold whole variables.
_BYTES_PER_SECOND = 4e6


class Link(Protocol):
    """One server. Several threads may call at a time."""

    @property
    def incarnation(self) -> str:
        """The start of the server, as its last reply says; "" before the first."""
        ...

    def call(self, request: Request[R]) -> R:
        """Return the reply to a request."""
        ...


class RemoteServer:
    """A parameter server in another process.

    Args:
        channel: To the server.
        index: Its number among the servers.

    Attributes:
        incarnation: The start of the server to which the last reply belongs; "" before the first.
    """

    def __init__(self, channel: Channel, index: int) -> None:
        self._channel, self._index = channel, index
        self.incarnation = ""

    def call(self, request: Request[R]) -> R:
        """Return the reply to a request, however long a long one takes.

        Raises:
            PSUnavailableError: The server was lost, or does not answer.
            DeadlineExceededError: It does not answer in time.
            JaxdistError: What the server raised.
        """
        kind = get_reply_kind(type(request))
        if isinstance(request, LongRequest):
            return self._call_long(request, kind)
        if isinstance(request, Waiting):
            request = msgspec.structs.replace(request, seconds=_get_wait_seconds())
        return read_reply(kind, self._exchange(make_message(request.method, request)))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _call_long(self, request: LongRequest[R], kind: type[R]) -> R:
        """Make a call that may take longer than the deadline of a message; see `LongCalls`."""
        seconds, own = min(_LONGEST_WAIT, _get_wait_seconds()), secrets.token_hex(8)
        request = msgspec.structs.replace(request, request=own, seconds=seconds)
        first = make_message(request.method, request)
        wait = make_message(WaitForCall.method, WaitForCall(request=own, seconds=seconds))
        deadline = get_settings().rpc_seconds + first.nbytes / _BYTES_PER_SECOND
        reply = self._exchange(first, deadline)
        while "state" in reply.fields:
            state = read_reply(Pending, reply).state
            # A server that was started again knows nothing of the call.
            reply = self._exchange(wait) if state == "running" else self._exchange(first, deadline)
        return read_reply(kind, reply)

    def _exchange(self, message: Message, seconds: float | None = None) -> Message:
        """Send one message, and return the reply."""
        try:
            reply = self._channel.call(message, seconds)
        except UnavailableError as error:
            text = str(error).replace("This server", f"ps {self._index}", 1)
            raise PSUnavailableError(text, [self._index]) from error
        except NotFoundError as error:
            raise self._explain(error) from error
        self.incarnation = reply.fields.get("incarnation", self.incarnation)
        return reply

    def _explain(self, error: NotFoundError) -> NotFoundError:
        """Return a better error, if the server has lost its variables."""
        found: ServerInfo = self.call(Hello())
        if found.variables:
            return error
        remedy = (
            "Make its snapshots more often: snapshot_seconds=5."
            if found.has_snapshots
            else "Let servers write snapshots: jaxdist.Server(..., snapshot_directory='snapshots')."
        )
        return NotFoundError(
            f"ps {self._index} at {self._channel.address} was started again, and has no "
            "variables.\n\n"
            "A server that was started again has the variables of its newest snapshot, and this "
            f"one had none.\n\nStart the job again, from its last checkpoint. {remedy}"
        )


def _get_wait_seconds() -> float:
    """Return how long a server may let a call wait for other closures: less than its deadline."""
    return get_settings().rpc_seconds / 2
