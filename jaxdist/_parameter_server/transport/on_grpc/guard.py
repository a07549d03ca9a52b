"""Who may call: looked at before a byte of a message is read."""

import hmac
from collections.abc import Callable
from typing import Any

from jaxdist._parameter_server.transport.on_grpc.package import (
    CALL_BYTES,
    CALL_KEY,
    SECRET_KEY,
    WIRE,
    WIRE_KEY,
    load_grpc,
)

# Says only that a task is there, and is asked by those who start tasks.
_HEALTH = "/grpc.health.v1.Health/Check"


def make_guard(secret: str | None) -> Any:
    """Return a server interceptor that lets callers through who know the secret."""
    grpc = load_grpc()
    code = grpc.StatusCode
    expected = None if secret is None else secret.encode()

    def refuse(status: Any, text: str) -> Any:
        # It reads nothing of the stream.
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
            # In the same time for every secret: it does not tell how much of it was right.
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
