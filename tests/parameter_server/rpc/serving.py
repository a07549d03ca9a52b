"""Servers of this process and in processes of their own, for the tests of rpc."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxdist
from jaxdist.experimental import rpc
from tests.parameter_server.transport.task import ROOT, SECONDS_TO_START, Task

INT = jax.ShapeDtypeStruct((), jnp.int32)
FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
LAYERS = ("grpc", "local")


@contextlib.contextmanager
def serve_methods(
    methods: Mapping[str, tuple[Any, Any]], layer: str = "grpc", *, concurrent: bool = False
) -> Iterator[tuple[rpc.Server, Any]]:
    """Serve functions with their signatures, and yield the server and a client."""
    server = rpc.Server.create(layer, "localhost:0")
    for name, (function, signature) in methods.items():
        server.register(name, function, signature, concurrent=concurrent)
    server.start()
    client: Any = None
    try:
        client = rpc.Client.create(layer, server.address, timeout_in_ms=20_000)
        yield server, client
    finally:
        if client is not None:
            client.close()
        server.stop()


@contextlib.contextmanager
def start_server_process(port: int = 0) -> Iterator[Task]:
    """Start `main` in a process, which is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.parameter_server.rpc.serving", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        if process.stdout is None or not (address := process.stdout.readline().strip()):
            raise RuntimeError(f"the server ended with code {process.wait(SECONDS_TO_START)}")
        yield Task(process, address)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def main(port: str) -> None:
    """Serve a counter, and a function that never returns, until the input ends."""
    seen = jaxdist.Variable(0, name="seen")

    @jaxdist.function
    def count(number: Any) -> Any:
        return seen.assign_add(number)

    server = rpc.Server.create("grpc", f"localhost:{port}")
    server.register("count", count, [INT])
    server.register("pid", lambda: os.getpid())
    server.register("read", lambda: seen.value())
    server.register("hang", lambda: threading.Event().wait(), concurrent=True)
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
