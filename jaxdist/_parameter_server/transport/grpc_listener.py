"""A task that answers by gRPC: who may call, how slowly, and the answers."""

import contextlib
import errno
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxdist._called import call_as
from jaxdist._parameter_server.transport.calls import answer, describe_failure, get_seconds
from jaxdist._parameter_server.transport.grpc_channel import (
    CALL_BYTES,
    CALL_KEY,
    OPTIONS,
    SECRET_KEY,
    SERVICE,
    WIRE,
    WIRE_KEY,
    load_grpc,
)
from jaxdist._parameter_server.transport.limits import Budget, Limits, Threads
from jaxdist._parameter_server.transport.message import Handler, Message
from jaxdist._parameter_server.transport.security import Security
from jaxdist._parameter_server.transport.stream import (
    REPLY,
    REQUEST,
    DamagedError,
    Incoming,
    Outgoing,
    RefusedError,
)
from jaxdist._processes import format_address
from jaxdist.errors import ClusterError, JaxdistError

# Launchers call it, also without a secret: it says only that the task is alive.
_HEALTH = "/grpc.health.v1.Health/Check"
_SECONDS_TO_STOP = 5.0
# Without a deadline of the caller, gRPC reports one in some hundred years.
_LONGEST = 1e9
_OPTIONS = (
    # Otherwise two servers could have one port, and each would get a part of the calls.
    ("grpc.so_reuseport", 0),
    # A caller that connects and sends nothing is disconnected. The default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class Watch:
    """One thread that cancels slow calls of a listener.

    Args:
        seconds: How long a call may take to send a message, or to receive one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cancels: dict[object, tuple[float, Callable[[], object]]] = {}
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False

    def close(self) -> None:
        """End the thread. The calls that are left have been cancelled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    @contextlib.contextmanager
    def limit(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel` if the block takes longer than it may."""
        key = object()
        with self._changed:
            self._cancels[key] = time.monotonic() + self._seconds, cancel
            if not self._is_running and not self._is_closed:
                self._is_running = True
                threading.Thread(target=self._run, name="slow calls", daemon=True).start()
        try:
            yield
        finally:
            # Without a notification: the thread wakes up at its time and finds nothing to do.
            with self._changed:
                self._cancels.pop(key, None)

    def _run(self) -> None:
        idle = False
        while True:
            with self._changed:
                if self._is_closed or (not self._cancels and idle):
                    self._is_running = False
                    return
                idle = not self._cancels
                # All limits are equally long, so the first that was added ends first.
                first = next(iter(self._cancels.values()), None)
                now = time.monotonic()
                wait = self._seconds if first is None else first[0] - now
                if wait > 0:
                    self._changed.wait(min(wait, 10.0))
                    continue
                late = [key for key, (end, _) in self._cancels.items() if end <= now]
                cancels = [self._cancels.pop(key)[1] for key in late]
            for cancel in cancels:
                cancel()


def make_guard(secret: str | None) -> Any:
    """Return a server interceptor that accepts only callers who know the secret."""
    grpc = load_grpc()
    code = grpc.StatusCode
    expected = None if secret is None else secret.encode()

    def refuse(status: Any, text: str) -> Any:
        # It reads nothing from the stream.
        def abort(_: Any, context: Any) -> None:
            context.abort(status, text)

        return grpc.stream_stream_rpc_method_handler(abort)

    class Guard(grpc.ServerInterceptor):
        def intercept_service(self, go_on: Callable[[Any], Any], details: Any) -> Any:
            if details.method == _HEALTH:
                return go_on(details)
            metadata = dict(details.invocation_metadata)
            if expected is not None and SECRET_KEY not in metadata:
                return refuse(code.UNAUTHENTICATED, "it has a secret, and the caller gave none")
            # In constant time, so that it does not reveal how much of the secret was right.
            given = metadata.get(SECRET_KEY, b"")
            if expected is not None and not hmac.compare_digest(given, expected):
                return refuse(code.UNAUTHENTICATED, "it has another secret than the caller")
            if details.method.startswith("/grpc.health."):
                return go_on(details)
            wire = metadata.get(WIRE_KEY, "none")
            if wire != WIRE:
                text = f"it has version {WIRE} of messages, and the caller has {wire[:20]}"
                return refuse(code.FAILED_PRECONDITION, text)
            if len(metadata.get(CALL_KEY, b"")) != CALL_BYTES:
                return refuse(code.INVALID_ARGUMENT, "the call has no id")
            return go_on(details)

    return Guard()


class GrpcListener:
    """A gRPC server.

    Args:
        host: Where it listens.
        port: 0 for a free one.
        handlers: A function for each method.
        limits: The largest messages, and how many calls, it accepts.
        security: Who may call.

    Raises:
        ClusterError: The address is in use, or belongs to another machine.
        UnauthenticatedError: Other machines reach the address, and anybody could call.
        MissingExtraError: grpcio is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        handlers: Mapping[str, Handler],
        limits: Limits,
        security: Security,
    ) -> None:
        self._grpc = grpc = load_grpc()
        health = load_grpc("grpc_health.v1.health")
        added = load_grpc("grpc_health.v1.health_pb2_grpc")
        security.check_address(host)
        self._handlers, self._limits = dict(handlers), limits
        self._budget = Budget(limits.bytes_in_flight)
        self._seconds = get_seconds(limits.reading_seconds)
        self._watch = Watch(self._seconds)
        self._threads = Threads(limits.calls, f"answers at {host}:{port}")
        self._server = grpc.server(
            self._threads,
            interceptors=(make_guard(security.secret),),
            options=(*OPTIONS, *_OPTIONS),
            maximum_concurrent_rpcs=limits.calls,
        )
        methods = {
            "Call": grpc.unary_stream_rpc_method_handler(self._answer_one),
            "Brief": grpc.unary_unary_rpc_method_handler(self._answer_briefly),
            "Stream": grpc.stream_stream_rpc_method_handler(self._answer),
        }
        handlers_of_grpc = grpc.method_handlers_generic_handler(SERVICE, methods)
        self._server.add_generic_rpc_handlers((handlers_of_grpc,))
        self._health = health.HealthServicer()
        added.add_HealthServicer_to_server(self._health, self._server)
        _check_free(host, int(port))
        bound = self._bind(format_address(host, port), security)
        self.address = format_address(host, bound)
        self._server.start()

    def stop(self) -> None:
        """Stop answering, and free the address. Calls that wait raise `UnavailableError`."""
        self._health.enter_graceful_shutdown()
        self._server.stop(None).wait(_SECONDS_TO_STOP)
        self._threads.shutdown()
        self._watch.close()

    def _bind(self, address: str, security: Security) -> int:
        try:
            if security.certificate is None:
                return int(self._server.add_insecure_port(address))
            credentials = self._grpc.ssl_server_credentials(
                [(security.key, security.certificate)],
                root_certificates=security.authority,
                require_client_auth=security.authority is not None,
            )
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            raise _make_bind_error(address) from None

    def _answer_one(self, chunk: bytes, context: Any) -> Iterator[bytes]:
        return self._answer(iter((chunk,)), context)

    def _answer_briefly(self, chunk: bytes, context: Any) -> bytes:
        call = dict(context.invocation_metadata())[CALL_KEY]
        sent = self._find_reply(call, iter((chunk,)), context)
        if sent is None:
            return b""
        if not sent.is_one_chunk:
            text = "its reply has more than one chunk"
            context.abort(self._grpc.StatusCode.OUT_OF_RANGE, text)
        return next(sent.make_chunks(call, REPLY))

    def _answer(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        call = dict(context.invocation_metadata())[CALL_KEY]
        sent = self._find_reply(call, chunks, context)
        if sent is None:
            return
        with self._watch.limit(context.cancel):
            yield from sent.make_chunks(call, REPLY)

    def _find_reply(self, call: bytes, chunks: Iterator[bytes], context: Any) -> Outgoing | None:
        """Receive a request, and return its reply; None if the caller has hung up."""
        request = self._receive(call, chunks, context)
        if request is None:
            return None
        reply, failure = answer(self._handlers, request)
        # Its arrays are free while the reply is sent.
        del request
        try:
            return call_as(f"The reply of {reply.method}", Outgoing, reply, self._limits, failure)
        except JaxdistError as error:
            failure = describe_failure(error, reply.method)
            return Outgoing(Message(reply.method), self._limits, failure)

    def _receive(self, call: bytes, chunks: Iterator[bytes], context: Any) -> Message | None:
        code = self._grpc.StatusCode
        if context.time_remaining() > _LONGEST:
            context.abort(code.INVALID_ARGUMENT, "the call has no deadline")
        incoming, taken = Incoming(call, REQUEST, self._limits), 0
        try:
            with self._watch.limit(context.cancel):
                for chunk in chunks:
                    incoming.add(chunk)
                    if not taken and (count := incoming.nbytes):
                        # The other half is for the bytes themselves.
                        patience = min(self._seconds / 2, context.time_remaining())
                        if not self._budget.take(count, patience):
                            text = "too many bytes are being received"
                            context.abort(code.RESOURCE_EXHAUSTED, text)
                        taken = count
                    incoming.allocate()
                    if incoming.is_complete:
                        break
            return incoming.finish()[0]
        except DamagedError as error:
            context.abort(code.DATA_LOSS, f"the request was damaged on its way: {error}")
        except RefusedError as error:
            context.abort(code.INVALID_ARGUMENT, str(error))
        except self._grpc.RpcError:
            # The caller has hung up.
            return None
        finally:
            if taken:
                self._budget.give_back(taken)
        return None


def _check_free(host: str, port: int) -> None:
    """Raise if a port is used at one of the addresses of a name, such as those of `localhost`.

    gRPC listens on those that are free, and clients would reach another program at the others.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return  # gRPC has an error of its own.
    for family, kind, protocol, _, where in found if port else []:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(where)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    there = "" if where[0] == host else f" ({where[0]})"
                    raise _make_bind_error(f"{host}:{port}{there}") from None


def _make_bind_error(address: str) -> ClusterError:
    return ClusterError(
        f"A task was to listen on {address}, and cannot.\n\n"
        "The address is one of this machine, the port is free, and this user may use it. "
        "Files of TLS are PEM.\n\n"
        "See what uses the port: ss -ltnp. Or choose another address, or port 0 for a free port."
    )
