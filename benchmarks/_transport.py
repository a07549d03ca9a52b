"""Messages between two processes: by `Channel.call`, and by a bare stream of gRPC.

`python -m benchmarks._transport` is the other process. It prints its two addresses, and ends with
its input. It has both servers: the memory that a process happens to have makes pushes up to twice
as fast, and so both find the same.
"""

import atexit
import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from zlib_ng.zlib_ng import crc32

from benchmarks._loop import Loop
from jaxdist._parameter_server.transport import Message, connect, serve
from jaxdist._parameter_server.transport.grpc_channel import OPTIONS, load_grpc
from jaxdist._parameter_server.transport.stream import CHUNK

SECONDS = 120.0


def channel(method: str, size: int, count: int = 1) -> Loop:
    """Calls with `count` arrays of `size` bytes: `push` sends, `pull` gets, `echo` does both."""
    to = connect(_start()[0], layer="grpc", name="ps 0")
    to.wait_until_ready(SECONDS)
    arrays = tuple(_values(size) for _ in range(count))
    request = Message("pull", {"size": size}) if method == "pull" else Message(method, {}, arrays)

    def call() -> int:
        reply = to.call(request, SECONDS)
        return int(reply.fields["bytes"]) if method == "push" else reply.nbytes

    return _repeat(call)


def bare(method: str, size: int) -> Loop:
    """The same bytes in the same chunks with the same checksum, and nothing else."""
    to = load_grpc().insecure_channel(_start()[1], OPTIONS)
    stream = to.stream_stream(f"/bare/{method}")
    values = _values(size)

    def call() -> int:
        if method == "push":
            return int(next(iter(stream(_cut(values), timeout=SECONDS, wait_for_ready=True))))
        request = iter([str(size).encode()])
        return _join(stream(request, timeout=SECONDS, wait_for_ready=True), size).nbytes

    return _repeat(call)


def _repeat(call: Callable[[], int]) -> Loop:
    last = [0]

    def loop(steps: int) -> None:
        for _ in range(steps):
            last[0] = call()

    return Loop(loop, facts=lambda: {"bytes": last[0]})


@functools.cache
def _values(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size, np.uint8)


def _cut(values: np.ndarray) -> Iterator[bytes]:
    view = values.data
    for at in range(0, len(view), CHUNK):
        piece = view[at : at + CHUNK]
        yield b"".join((crc32(piece).to_bytes(4, "little"), piece))


def _join(chunks: Iterator[bytes], size: int) -> np.ndarray:
    values, at = np.empty(size, np.uint8), 0
    for chunk in chunks:
        piece = memoryview(chunk)[4:]
        if crc32(piece) != int.from_bytes(chunk[:4], "little"):
            raise ValueError("a chunk was damaged")
        values.data[at : at + len(piece)] = piece
        at += len(piece)
    return values


@functools.cache
def _start() -> list[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._transport"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    line = "" if process.stdout is None else process.stdout.readline()
    addresses = [str(address) for address in line.split()]
    if len(addresses) != 2:
        raise RuntimeError(f"the server ended with code {process.wait()}")
    return addresses


def _serve_channel() -> str:
    def push(request: Message) -> Message:
        return Message("push", {"bytes": request.nbytes})

    def pull(request: Message) -> Message:
        return Message("pull", {}, (_values(request.fields["size"]),))

    handlers = {"push": push, "pull": pull, "echo": lambda request: request}
    return serve("127.0.0.1:0", handlers, layer="grpc").address


def _serve_bare(stack: contextlib.ExitStack, size: int = 2**26) -> str:
    def push(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        yield str(_join(chunks, size).nbytes).encode()

    def pull(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        yield from _cut(_values(int(next(chunks))))

    grpc = load_grpc()
    methods = {
        "push": grpc.stream_stream_rpc_method_handler(push),
        "pull": grpc.stream_stream_rpc_method_handler(pull),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(server.stop, None)
    return f"127.0.0.1:{port}"


def main() -> None:
    """Answer until the input ends."""
    with contextlib.ExitStack() as stack:
        print(_serve_channel(), _serve_bare(stack), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
