"""A server and its workers as processes, by hand: one loop of gRPC, and nothing else.

`python -m benchmarks._raw_tasks server` prints its address, and ends with its input.
`python -m benchmarks._raw_tasks worker ADDRESS BATCH` takes steps; with the address "alone" it
exchanges nothing.

A step is one exchange: the changes of all variables go, and their new values come back. The bytes,
the chunks, the checksum and the options of gRPC are those of jaxdist. There are no versions, no
names and no limits, nothing counts a change once, and nobody schedules a step.
"""

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from zlib_ng.zlib_ng import crc32

from benchmarks._children import Child, answer_lines, share
from benchmarks._loop import Loop
from benchmarks._server_job import LENGTH, MANY, RATE, WORKERS, make_batch, make_parameters
from jaxdist._parameter_server.transport.grpc_channel import OPTIONS, load_grpc
from jaxdist._parameter_server.transport.stream import CHUNK

_SECONDS = 120.0
Arrays = Sequence[np.ndarray]


def find_loss(parameters: Sequence[Any], images: Any, labels: Any) -> Any:
    """Return the loss of the net."""
    x = images
    for n in range(0, len(parameters), 2):
        x = x @ parameters[n] + parameters[n + 1]
        x = jax.nn.relu(x) if n < len(parameters) - 2 else x
    logits = jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


def train(batch: int) -> Loop:
    """One server, and two workers that exchange by hand."""
    return _run_workers("train", str(batch), WORKERS)


def train_alone(batch: int) -> Loop:
    """Two workers that compute the same gradients, and exchange nothing."""
    return _run_workers("alone", str(batch), WORKERS)


def move_many() -> Loop:
    """One server, and one worker that changes each of a hundred variables."""
    return _run_workers("many", "0", 1)


def _run_workers(what: str, batch: str, count: int) -> Loop:
    module = ["-m", "benchmarks._raw_tasks"]
    address = "alone" if what == "alone" else Child([*module, "server", what]).read()
    workers = [Child([*module, what, address, batch]) for _ in range(count)]
    for worker in workers:
        worker.read()
    said: list[str] = []

    def run(steps: int) -> None:
        said.append(share(workers, steps)[0])

    def facts() -> dict[str, Any]:
        return {"has learned": float(said[-1]) < float(said[0])}

    return Loop(run, facts=facts)


def _cut(arrays: Arrays) -> Iterator[bytes]:
    pieces: list[memoryview] = []
    free = CHUNK
    for array in arrays:
        view = array.reshape(-1).view(np.uint8).data
        at = 0
        while at < len(view):
            piece = view[at : at + free]
            pieces.append(piece)
            at += len(piece)
            free -= len(piece)
            if not free:
                yield _seal(pieces)
                pieces.clear()
                free = CHUNK
    if pieces:
        yield _seal(pieces)


def _seal(pieces: list[memoryview]) -> bytes:
    found = 0
    for piece in pieces:
        found = crc32(piece, found)
    return b"".join((found.to_bytes(4, "little"), *pieces))


def _join(chunks: Iterator[bytes], size: int) -> np.ndarray:
    values, at = np.empty(size, np.uint8), 0
    for chunk in chunks:
        piece = memoryview(chunk)[4:]
        if crc32(piece) != int.from_bytes(chunk[:4], "little"):
            raise ValueError("a chunk was damaged")
        values.data[at : at + len(piece)] = piece
        at += len(piece)
    return values.view("float32")


def _split(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    at = 0
    for shape in shapes:
        count = math.prod(shape)
        found.append(flat[at : at + count].reshape(shape))
        at += count
    return found


def _make_values(what: str) -> list[np.ndarray]:
    if what == "many":
        return [np.ones(LENGTH, "float32") for _ in range(MANY)]
    return make_parameters()


def _serve(what: str) -> None:
    values = np.concatenate([x.ravel() for x in _make_values(what)])
    lock = threading.Lock()

    def exchange(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        nonlocal values
        change = _join(chunks, values.nbytes)
        with lock:
            values = new = values - change
        yield from _cut([new])

    grpc = load_grpc()
    methods = {"exchange": grpc.stream_stream_rpc_method_handler(exchange)}
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        server.start()
        stack.callback(server.stop, None)
        print(f"127.0.0.1:{port}", flush=True)
        sys.stdin.read()


def _work(what: str, address: str, batch: int) -> None:
    values = _make_values(what)
    given: tuple[Any, ...] = () if what == "many" else make_batch(batch)
    find = _compile(what)
    exchange = None
    if address != "alone":
        channel = load_grpc().insecure_channel(address, OPTIONS)
        exchange = channel.stream_stream("/raw/exchange")
    shapes = [x.shape for x in values]
    size = sum(x.nbytes for x in values)
    own: Sequence[Any] = jax.device_put(values)

    def take(steps: int) -> float:
        nonlocal own
        loss = 0.0
        for _ in range(steps):
            found, changes = find(own, *given)
            sent = [np.asarray(x) for x in changes]
            loss = float(found)
            if exchange is not None:
                chunks = exchange(_cut(sent), timeout=_SECONDS, wait_for_ready=True)
                own = jax.device_put(_split(_join(chunks, size), shapes))
        return loss

    answer_lines(take)


def _compile(what: str) -> Callable[..., Any]:
    def find(parameters: Sequence[Any], images: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(find_loss)(parameters, images, labels)
        return loss, [RATE * x for x in grads]

    def halve(parameters: Sequence[Any]) -> Any:
        return parameters[0][0], [0.01 * x for x in parameters]

    return jax.jit(halve if what == "many" else find)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve(sys.argv[2])
    else:
        _work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
