"""When connections and servers end."""

import gc
import os
import threading
import weakref
from typing import Any

import pytest

from jaxdist.errors import ClusterError, UnauthenticatedError, UnavailableError
from jaxdist.experimental import rpc
from tests.parameter_server.rpc.serving import LAYERS, serve_methods


@pytest.mark.parametrize("layer", LAYERS)
def test_a_stopped_server_and_a_closed_client_are_unavailable(layer: str) -> None:
    with serve_methods({"one": (lambda: 1, None)}, layer) as (server, client):
        other: Any = rpc.Client.create(layer, server.address, "other")
        other.close()
        other.close()
        for _ in range(2):
            code, text = other.one().get_error()
            assert code == 14
            assert "this channel is closed" in text
        with pytest.raises(UnavailableError, match=r"client 'other'(.|\n)*'one'"):
            other.one_blocking()
        assert client.one_blocking() == 1
        server.stop()
        assert client.one().get_error()[0] == 14
        with pytest.raises(UnavailableError, match="is not available"):
            client.one_blocking()


@pytest.mark.parametrize("layer", LAYERS)
def test_calls_that_wait_end_when_the_client_closes(layer: str) -> None:
    go_on, started = threading.Event(), threading.Event()

    def wait() -> int:
        started.set()
        return int(go_on.wait(20))

    with serve_methods({"wait": (wait, None)}, layer) as (_, client):
        result = client.wait()
        assert started.wait(20)
        client.close()
        assert result.get_error()[0] == 14
        go_on.set()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_server_that_nothing_refers_to_frees_its_address(layer: str) -> None:
    # Of this process alone: another test could take the port in between.
    high, low = divmod(os.getpid() % (250 * 250), 250)
    server = rpc.Server.create(layer, f"127.1.{high}.{low + 1}:0")
    server.register("one", lambda: 1)
    server.start()
    address, gone = server.address, weakref.ref(server)
    client: Any = rpc.Client.create(layer, address)
    assert client.one_blocking() == 1
    del server
    gc.collect()
    assert gone() is None
    assert client.one(timeout_in_ms=20_000).get_error()[0] == 14
    again = rpc.Server.create(layer, address)
    again.register("one", lambda: 2)
    again.start()
    # The same client finds it.
    assert rpc.Client.create(layer, address).call("one").get_value() == [2]
    client.close()
    again.stop()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_result_and_a_method_outlive_their_client(layer: str) -> None:
    go_on = threading.Event()
    with serve_methods({"wait": (lambda: go_on.wait(20), None)}, layer) as (server, _):
        client: Any = rpc.Client.create(layer, server.address)
        gone = weakref.ref(client._connection)
        result, method = client.wait(), client.wait_blocking
        del client
        gc.collect()
        go_on.set()
        assert result.get_value()
        assert method()
        assert gone() is not None
        del result, method
        gc.collect()
        assert gone() is None


def test_an_address_belongs_to_one_server() -> None:
    with serve_methods({}) as (server, _):
        with pytest.raises(ClusterError, match=server.address):
            rpc.Server.create("grpc", server.address).start()


def test_another_address_than_loopback_needs_a_secret_and_clients_need_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("JAXDIST_SECRET", "JAXDIST_SECRET_FILE", "JAXDIST_TLS_CERTIFICATE"):
        monkeypatch.delenv(name, raising=False)
    server = rpc.Server.create("grpc", "0.0.0.0:0")
    with pytest.raises(UnauthenticatedError, match=r"0\.0\.0\.0"):
        server.start()
    monkeypatch.setenv("JAXDIST_SECRET", "0123456789abcdef")
    server.register("one", lambda: 1)
    server.start()
    address = server.address.replace("0.0.0.0", "127.0.0.1")
    client: Any = rpc.Client.create("grpc", address, timeout_in_ms=20_000)
    assert client.one_blocking() == 1
    for wrong in ("fedcba9876543210", ""):
        monkeypatch.setenv("JAXDIST_SECRET", wrong)
        with pytest.raises(UnauthenticatedError, match="secret"):
            rpc.Client.create("grpc", address, timeout_in_ms=20_000)
    client.close()
    server.stop()
