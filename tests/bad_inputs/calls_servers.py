"""Valid calls of the tasks of parameter servers."""

import tempfile
from collections.abc import Callable
from typing import Any

import jaxdist
from tests.bad_inputs.call import Call


def _arguments() -> dict[str, Any]:
    return {
        "server_or_cluster_def": {"ps": ["127.0.0.1:0"]},
        "job_name": "ps",
        "task_index": 0,
        "protocol": "grpc",
        "config": None,
        "start": False,
        "snapshot_directory": tempfile.mkdtemp(),
        "snapshot_seconds": 60.0,
        "modules": ("my_data",),
        "announce": False,
    }


def _stop(server: Any) -> None:
    server.stop()


def _of_server(method: str) -> Callable[..., Any]:
    def call(*args: Any, **arguments: Any) -> Any:
        server = jaxdist.Server({"ps": ["127.0.0.1:0"]}, snapshot_directory=tempfile.mkdtemp())
        try:
            return getattr(server, method)(*args, **arguments)
        finally:
            server.stop()

    return call


def _join(*args: Any, **arguments: Any) -> None:
    server = jaxdist.Server({"ps": ["127.0.0.1:0"]})
    # Otherwise it waits for ever.
    server._is_stopped.set()
    try:
        server.join(*args, **arguments)
    finally:
        server.stop()


CALLS = {
    "jaxdist.Server": Call(lambda: jaxdist.Server, _arguments, _stop),
    "jaxdist.Server.create_local_server": Call(
        lambda: jaxdist.Server.create_local_server,
        lambda: {"config": None, "start": False},
        _stop,
    ),
    "jaxdist.Server.join": Call(lambda: _join),
    **{
        f"jaxdist.Server.{method}": Call(lambda method=method: _of_server(method))
        for method in ("snapshot", "start", "stop")
    },
}
