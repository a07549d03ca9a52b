"""A gRPC proxy between real processes, which harms the k-th message of a job.

A message is a request or a reply, of any task to any other. A proxy has one address for each task
and each caller; all of them count together.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec

# What happens to the k-th message.
#   drop       It never arrives.
#   delay      It arrives when its caller has given up; a reply arrives late, and in time.
#   duplicate  The call comes twice, and the caller gets the first reply; a reply comes twice.
#   repeat     The call comes twice, and the caller gets the second reply.
#   cut        Half of its bytes arrive, and the connection ends.
KINDS = ("drop", "delay", "duplicate", "repeat", "cut")
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 2**21))
_LATE_SECONDS = 10.0
_OWN = ("grpc-", "user-agent", ":", "content-type", "te")


class Wire:
    """Counts the messages of a job, and says which of them is harmed.

    Attributes:
        names: What each message was, for a test that fails.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin("none", 0)

    def begin(self, kind: str, number: int, seconds: float = 0.0) -> None:
        """Begin a job: harm one message. `seconds` is the deadline of its calls."""
        with self._lock:
            self.kind, self._number, self.seconds = kind, number, seconds
            self.names: list[str] = []
            # What belongs to the job before does not count.
            self.job = object()

    def pass_one(self, name: str, job: object) -> str:
        """Count a message, and return what happens to it."""
        with self._lock:
            if job is not self.job:
                return "none"
            self.names.append(name)
            return self.kind if len(self.names) == self._number else "none"


class MessageProxy:
    """Passes calls on to one task."""

    def __init__(self, wire: Wire, name: str, target: str) -> None:
        self._wire, self._name = wire, name
        self._channel = grpc.insecure_channel(
            target,
            (("grpc.max_receive_message_length", 2**21), ("grpc.use_local_subchannel_pool", 1)),
        )
        self._threads = ThreadPoolExecutor(32, "proxy")
        self._server = grpc.server(self._threads, options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Handler(self),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """End all calls."""
        self._server.stop(None).wait(10)
        self._channel.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def answer(self, details: Any, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Pass one call on."""
        request = list(chunks)
        call = _Forward(self._channel, details, request)
        if "Health" in details.method:
            yield from call.run(context, context.time_remaining())
            return
        job, method = self._wire.job, _find_method(request[0])
        kind = self._wire.pass_one(f"{method} to {self._name}", job)
        if kind in ("drop", "delay"):
            _wait_for_end(context, self._wire.seconds)
            if kind == "delay":
                call.run(None, _LATE_SECONDS)
            return
        if kind == "cut":
            call.cut()
            context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy has cut the request")
        reply = call.run(context, context.time_remaining())
        if kind in ("duplicate", "repeat"):
            second = call.run(context, context.time_remaining())
            reply = second if kind == "repeat" else reply
        kind = self._wire.pass_one(f"reply of {method} from {self._name}", job)
        yield from self._harm_reply(kind, reply, context)

    def _harm_reply(self, kind: str, reply: list[bytes], context: Any) -> Iterator[bytes]:
        match kind:
            case "drop":
                _wait_for_end(context, self._wire.seconds)
                return
            case "delay":
                _wait_for_end(context, self._wire.seconds / 3)
            case "duplicate" | "repeat":
                yield from reply
            case "cut":
                yield from _cut(reply)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy has cut the reply")
        yield from reply


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, proxy: MessageProxy) -> None:
        self._proxy = proxy

    def service(self, handler_call_details: Any) -> Any:
        # gRPC names its arguments otherwise, and calls it by position.
        answer: Any = functools.partial(self._proxy.answer, handler_call_details)
        return grpc.stream_stream_rpc_method_handler(answer)


class _Forward:
    """One call, which can be passed on several times."""

    def __init__(self, channel: Any, details: Any, request: list[bytes]) -> None:
        self._call = channel.stream_stream(details.method)
        self._request = request
        self._metadata = tuple(
            (key, value) for key, value in details.invocation_metadata if not key.startswith(_OWN)
        )

    def run(self, context: Any, seconds: float) -> list[bytes]:
        """Return the chunks of the reply. Without a context nobody waits for them."""
        try:
            return list(self._send(self._request, seconds))
        except grpc.RpcError as error:
            if context is None:
                return []
            found: Any = error
            context.abort(found.code(), found.details())
            raise

    def cut(self) -> None:
        """Send half of the request."""
        with contextlib.suppress(grpc.RpcError):
            list(self._send(list(_cut(self._request)), _LATE_SECONDS))

    def _send(self, chunks: list[bytes], seconds: float) -> Any:
        return self._call(
            iter(chunks), timeout=seconds, metadata=self._metadata, wait_for_ready=True
        )


def _cut(chunks: list[bytes]) -> Iterator[bytes]:
    """Return the first half of the bytes."""
    left = sum(map(len, chunks)) // 2
    for chunk in chunks:
        if left:
            yield chunk[:left]
        left -= min(left, len(chunk))


def _wait_for_end(context: Any, seconds: float) -> None:
    """Wait some seconds, or until the caller has given up."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(seconds)


def _find_method(chunk: bytes) -> str:
    """Return the method of a request, from its first chunk."""
    size = int.from_bytes(chunk[4:8], "little")
    return msgspec.msgpack.decode(chunk[8 : 8 + size])[0]


@contextlib.contextmanager
def start_proxies(wire: Wire, targets: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a proxy for each target, by name; return their addresses."""
    with contextlib.ExitStack() as stack:
        addresses = {}
        for name, target in targets.items():
            proxy = MessageProxy(wire, name, target)
            stack.callback(proxy.close)
            addresses[name] = proxy.address
        yield addresses
