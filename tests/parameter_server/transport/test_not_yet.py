"""A task behind a proxy that answers before the task does."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from jaxdist._parameter_server.transport import Limits
from jaxdist._parameter_server.transport.grpc_channel import GrpcChannel
from jaxdist._parameter_server.transport.security import Security
from jaxdist.errors import DeadlineExceededError, UnavailableError
from tests.strategies.oracle import refused

NO_LIMIT = 10**6


class _Proxy(grpc.GenericRpcHandler):
    """Answers `refusals` health checks with a status, and the others with SERVING."""

    def __init__(self, refusals: int, code: grpc.StatusCode) -> None:
        self.refusals, self.code = refusals, code
        self.asked = 0
        # Set, an answer comes; it does not come after the refusals while this is cleared.
        self.answers = threading.Event()
        self.answers.set()
        self.was_asked = threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        check: Any = self._check
        return grpc.unary_unary_rpc_method_handler(
            check, response_serializer=health_pb2.HealthCheckResponse.SerializeToString
        )

    def _check(self, request: Any, context: Any) -> Any:
        self.asked += 1
        self.was_asked.set()
        if self.asked <= self.refusals:
            context.abort(self.code, "upstream connect error")
        self.answers.wait(60)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def _proxied(refusals: int, code: grpc.StatusCode) -> Iterator[tuple[_Proxy, GrpcChannel]]:
    proxy = _Proxy(refusals, code)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[proxy])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = GrpcChannel(f"127.0.0.1:{port}", "ps 0", Limits(), Security())
    try:
        yield proxy, channel
    finally:
        channel.close()
        server.stop(None).wait()


@pytest.mark.parametrize("refusals", [0, 1, 2, 3])
def test_an_answer_that_means_not_yet_is_waited_out(refusals: int) -> None:
    with _proxied(refusals, grpc.StatusCode.UNAVAILABLE) as (proxy, channel):
        channel.wait_until_ready(60.0)
        assert proxy.asked == refusals + 1


def test_the_error_at_the_end_says_what_answers_there() -> None:
    with _proxied(NO_LIMIT, grpc.StatusCode.UNAVAILABLE) as (proxy, channel):
        with refused(DeadlineExceededError, "ps 0 at", "0.3 s", "upstream connect error"):
            channel.wait_until_ready(0.3)
        assert proxy.asked > 1


def test_a_proxy_that_refuses_and_then_hangs_is_quoted_as_well() -> None:
    with _proxied(1, grpc.StatusCode.UNAVAILABLE) as (proxy, channel):
        proxy.answers.clear()
        with refused(DeadlineExceededError, "1 s", "upstream connect error"):
            channel.wait_until_ready(1.0)
        proxy.answers.set()
        assert proxy.asked == 2


def test_an_answer_of_no_task_of_jaxdist_is_an_error_at_once() -> None:
    with _proxied(NO_LIMIT, grpc.StatusCode.UNIMPLEMENTED) as (proxy, channel):
        with refused(UnavailableError, "not a task of jaxdist"):
            channel.wait_until_ready(60.0)
        assert proxy.asked == 1


def test_a_channel_that_is_closed_meanwhile_ends_the_wait() -> None:
    with _proxied(NO_LIMIT, grpc.StatusCode.UNAVAILABLE) as (proxy, channel):
        closing = threading.Thread(target=lambda: proxy.was_asked.wait() and channel.close())
        closing.start()
        with pytest.raises(UnavailableError, match="closed"):
            channel.wait_until_ready(60.0)
        closing.join()
