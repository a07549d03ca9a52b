"""Valid calls of rpc: its server and its clients in one process."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.experimental.rpc import Client, Server
from tests.bad_inputs.call import Call

# Stands for the address of the server that is started for the call.
_HERE = "here:0"
_INT = jax.ShapeDtypeStruct((), jnp.int32)
_DEADLINE_EXCEEDED = 4  # the code of gRPC


def _add(a: Any, b: Any) -> Any:
    return a + b


def _server() -> Server:
    server = Server.create("local", "localhost:0")
    server.register("add", _add, [_INT, _INT])
    return server


def _of_server(method: str) -> Callable[..., Any]:
    def call(*args: Any, **arguments: Any) -> Any:
        server = _server()
        try:
            return getattr(server, method)(*args, **arguments)
        finally:
            server.stop()

    return call


def _makes_client(make: Callable[..., Client]) -> Callable[..., Any]:
    """A function that makes a client of a server that it starts and stops."""

    def call(*args: Any, **arguments: Any) -> Any:
        server = _server()
        server.start()
        if arguments["address"] is _HERE:
            arguments["address"] = server.address
        try:
            make(*args, **arguments).close()
        finally:
            server.stop()

    return call


def _of_client(use: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **arguments: Any) -> Any:
        server = _server()
        server.start()
        client = Client.create("local", server.address)
        try:
            return use(client, *args, **arguments)
        finally:
            client.close()
            server.stop()

    return call


def _call(client: Client, *args: Any, **arguments: Any) -> Any:
    result = client.call(*args, **arguments)
    code, _ = result.get_error()
    # Half a millisecond is a time, and too short for a busy machine.
    is_late = "timeout_in_ms" in arguments and code == _DEADLINE_EXCEEDED
    return None if is_late else result.get_value()


def _of_result(method: str) -> Callable[..., Any]:
    def use(client: Client, *args: Any, **arguments: Any) -> Any:
        result = client.call("add", [1, 2])
        return getattr(result, method)(*args, **arguments)

    return _of_client(use)


_PLACE = "jaxdist.experimental.rpc"
_WHERE = {"rpc_layer": "local", "address": "localhost:0"}
_THERE = {"rpc_layer": "local", "address": _HERE, "name": "c", "timeout_in_ms": 500}
CALLS: dict[str, Call] = {
    f"{_PLACE}.Server": Call(lambda: Server, lambda: dict(_WHERE)),
    f"{_PLACE}.Server.create": Call(lambda: Server.create, lambda: dict(_WHERE)),
    f"{_PLACE}.Server.register": Call(
        lambda: _of_server("register"),
        lambda: {"method_name": "subtract", "func": _add, "input_signature": [_INT, _INT]},
    ),
    f"{_PLACE}.Server.start": Call(lambda: _of_server("start")),
    f"{_PLACE}.Server.stop": Call(lambda: _of_server("stop")),
    f"{_PLACE}.Client": Call(lambda: _makes_client(Client), lambda: dict(_THERE)),
    f"{_PLACE}.Client.create": Call(lambda: _makes_client(Client.create), lambda: dict(_THERE)),
    f"{_PLACE}.Client.call": Call(
        lambda: _of_client(_call),
        lambda: {"method_name": "add", "args": [1, 2], "output_specs": _INT},
    ),
    f"{_PLACE}.Client.close": Call(lambda: _of_client(Client.close)),
    **{
        f"{_PLACE}.StatusOrResult.{method}": Call(lambda method=method: _of_result(method))
        for method in ("get_error", "get_value", "is_ok")
    },
}
