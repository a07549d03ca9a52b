"""The caller's side of a connection by gRPC, and what both sides agree on."""

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxdist._called import called
from jaxdist._parameter_server.transport.calls import Peer, get_seconds, make_error
from jaxdist._parameter_server.transport.limits import Limits
from jaxdist._parameter_server.transport.message import Message
from jaxdist._parameter_server.transport.security import Security
from jaxdist._parameter_server.transport.stream import (
    CHUNK,
    REPLY,
    REQUEST,
    DamagedError,
    Incoming,
    Outgoing,
    RefusedError,
)
from jaxdist.errors import (
    ArgumentError,
    JaxdistError,
    MissingExtraError,
    ProgramMismatchError,
    UnauthenticatedError,
)

SERVICE = "jaxdist.Transport"
# The version of everything that both sides must read alike.
WIRE = "4"

WIRE_KEY = "jaxdist-wire"
CALL_KEY = "jaxdist-call-bin"
SECRET_KEY = "jaxdist-secret-bin"
CALL_BYTES = 16

OPTIONS = (
    # A chunk has its checksum in front.
    ("grpc.max_receive_message_length", CHUNK + 64),
    # How far gRPC reads ahead. With its default a chunk waits for the other side several times.
    ("grpc.http2.lookahead_bytes", 8 * CHUNK),
)


def load_grpc(module: str = "grpc") -> Any:
    """Import gRPC, or one of the modules that come with the extra.

    Raises:
        MissingExtraError: It is not installed.
    """
    # Otherwise it prints a line for each connection that a server closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return importlib.import_module(module)
    except ImportError:
        package = "grpcio-health-checking" if module.startswith("grpc_health") else "grpcio"
        raise MissingExtraError(
            f"Calls between processes need the package {package}, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            "Install it with: pip install grpcio grpcio-health-checking flatbuffers zlib-ng"
        ) from None


_OPTIONS = (
    *OPTIONS,
    # gRPC waits longer and longer, up to two minutes, before it tries again to connect. A server
    # that was started again must be found at once.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A replaced pod has another address under its name; the default time is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A connection of its own, so that it ends with the channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Tasks of a cluster reach each other directly, even if the internet is behind a proxy.
    ("grpc.enable_http_proxy", 0),
    # The caller's own thread waits for a reply. Otherwise each call would start another one.
    ("SingleThreadedUnaryStream", 1),
    # gRPC must not repeat a call: callers count them.
    ("grpc.enable_retries", 0),
)
_NAP = 0.05
_SECONDS_TO_CLOSE = 1.0

_Receive = Callable[[Outgoing, bytes, Incoming, dict[str, Any]], None]


class _LongReplyError(Exception):
    """The reply has more than one chunk."""


class GrpcChannel:
    """A gRPC channel.

    Args:
        address: Where the task listens, or will listen.
        name: Of the task, for errors.
        limits: The most that a reply may have.
        security: The secret and certificates for the task.

    Raises:
        MissingExtraError: grpcio is not installed.
    """

    def __init__(self, address: str, name: str, limits: Limits, security: Security) -> None:
        self._grpc = grpc = load_grpc()
        self.address, self._limits = address, limits
        self._peer = Peer(name, address)
        if security.certificate is None and security.authority is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(
                security.authority, security.key, security.certificate
            )
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._call = self._channel.unary_stream(f"/{SERVICE}/Call")
        self._brief = self._channel.unary_unary(f"/{SERVICE}/Brief")
        self._stream = self._channel.stream_stream(f"/{SERVICE}/Stream")
        # Not `HealthStub`: gRPC crashes if one is made for a channel that was just closed.
        self._health = health = load_grpc("grpc_health.v1.health_pb2")
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health.HealthCheckRequest.SerializeToString,
            health.HealthCheckResponse.FromString,
        )
        known = () if security.secret is None else ((SECRET_KEY, security.secret.encode()),)
        self._metadata = ((WIRE_KEY, WIRE), *known)
        # The id of a call is that of this channel, and a number.
        self._id = os.urandom(8)
        self._numbers = itertools.count()
        self._is_closed = False

    @called("Channel.call")
    def call(self, message: Message, seconds: float | None = None) -> Message:
        """Call a method of the other task; see `Channel.call`."""
        request = Outgoing(message, self._limits)
        return self._exchange(message.method, request, self._receive_all, get_seconds(seconds))

    @called("Channel.call")
    def call_briefly(self, message: Message, seconds: float | None = None) -> Message | None:
        """Call a method; see `Channel.call_briefly`."""
        request = Outgoing(message, self._limits)
        receive = self._receive_one if request.is_one_chunk else self._receive_all
        try:
            return self._exchange(message.method, request, receive, get_seconds(seconds))
        except _LongReplyError:
            self._peer.note_answer()
            return None

    def _exchange(
        self, method: str, request: Outgoing, receive: _Receive, seconds: float
    ) -> Message:
        call = self._id + next(self._numbers).to_bytes(8, "little")
        incoming = Incoming(call, REPLY, self._limits)
        options = {
            "timeout": max(seconds, 0.0),
            "metadata": (*self._metadata, (CALL_KEY, call)),
        }
        try:
            self._run(lambda: receive(request, call, incoming, options), method, seconds)
        except JaxdistError:
            # The reply is complete; only the end of the stream was lost.
            if not incoming.is_complete:
                raise
        try:
            reply, failure = incoming.finish()
        except (DamagedError, RefusedError) as error:
            raise self._make_damaged(method, error) from None
        self._peer.note_answer()
        if failure is not None:
            raise make_error(failure)
        return reply

    def _receive_all(
        self, request: Outgoing, call: bytes, incoming: Incoming, options: dict[str, Any]
    ) -> None:
        # A stream of requests needs a thread of gRPC; a single chunk does not.
        chunks = request.make_chunks(call, REQUEST)
        start, sent = (self._call, next(chunks)) if request.is_one_chunk else (self._stream, chunks)
        for chunk in start(sent, **options):
            incoming.add(chunk)
            incoming.allocate()

    def _receive_one(
        self, request: Outgoing, call: bytes, incoming: Incoming, options: dict[str, Any]
    ) -> None:
        try:
            chunk = self._brief(next(request.make_chunks(call, REQUEST)), **options)
        except self._grpc.RpcError as error:
            if error.code() is self._grpc.StatusCode.OUT_OF_RANGE:
                raise _LongReplyError from None
            raise
        incoming.add(chunk)
        incoming.allocate()

    def wait_until_ready(self, seconds: float | None = None) -> None:
        """Wait until the other task answers; see `Channel.wait_until_ready`."""
        seconds = get_seconds(seconds)
        deadline = time.monotonic() + seconds
        request = self._health.HealthCheckRequest()
        serving = self._health.HealthCheckResponse.SERVING
        status, said = None, ""

        def check() -> None:
            nonlocal status, said
            left = max(deadline - time.monotonic(), 0.0)
            try:
                status = self._check(request, timeout=left, wait_for_ready=True).status
            except self._grpc.RpcError as error:
                # A proxy answers like this while its task starts; also with HTTP's 502 to 504.
                if said and error.code() is self._grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise self._peer.make_deadline("wait_until_ready", seconds, said) from None
                if error.code() is not self._grpc.StatusCode.UNAVAILABLE:
                    raise
                status, said = None, " ".join(str(error.details()).split())[:200]

        self._run(check, "wait_until_ready", seconds)
        while status != serving:
            # It is being started, or stopped and perhaps started again.
            time.sleep(_NAP)
            if time.monotonic() >= deadline:
                raise self._peer.make_deadline("wait_until_ready", seconds, said)
            self._run(check, "wait_until_ready", seconds)

    def close(self) -> None:
        """Close the connection; calls that wait raise `UnavailableError`."""
        self._is_closed = True
        # gRPC waits until its calls have ended, and a call that was being sent to a task that is
        # stopped does not: its bytes are in the socket. Nobody here waits for them.
        ending = threading.Thread(target=self._channel.close, name="channel closes", daemon=True)
        ending.start()
        ending.join(_SECONDS_TO_CLOSE)

    def _run(self, exchange: Callable[[], None], method: str, seconds: float) -> None:
        if self._is_closed:
            raise self._peer.make_unavailable(method, "this channel is closed")
        try:
            exchange()
        except self._grpc.RpcError as error:
            raise self._make_error(error, method, seconds) from None
        except (DamagedError, RefusedError) as error:
            raise self._make_damaged(method, error) from None
        except ValueError as error:
            # gRPC's error for a channel that another thread has just closed.
            raise self._peer.make_unavailable(method, str(error)) from None

    def _make_damaged(self, method: str, error: Exception) -> JaxdistError:
        return self._peer.make_unavailable(method, f"its reply was damaged on its way: {error}")

    def _make_error(self, error: Any, method: str, seconds: float) -> JaxdistError:
        code, status = error.code(), self._grpc.StatusCode
        text = " ".join(str(error.details()).split())[:500]
        if self._is_closed:
            return self._peer.make_unavailable(method, "this channel was closed")
        if code is status.DEADLINE_EXCEEDED:
            return self._peer.make_deadline(method, seconds)
        if code is status.UNAUTHENTICATED:
            return UnauthenticatedError(
                f"{self._peer} refused the call of {method!r}: {text}.\n\n"
                "All tasks of a job have one secret.\n\n"
                "Set JAXDIST_SECRET_FILE to the same file, or a copy of it, for all of them."
            )
        if code is status.FAILED_PRECONDITION:
            return ProgramMismatchError(
                f"{self._peer} refused the call of {method!r}: {text}.\n\n"
                "Tasks of one job understand the same messages.\n\n"
                "Install the same version of jaxdist for all of them."
            )
        if code is status.INVALID_ARGUMENT:
            return ArgumentError(
                f"{self._peer} refused the message of {method!r}: {text}.\n\n"
                "Limits keep a task from running out of memory.\n\n"
                "Send several messages, or an array in shards."
            )
        if code is status.UNIMPLEMENTED:
            text = f"what listens there is not a task of jaxdist ({text})"
        return self._peer.make_unavailable(method, text)
