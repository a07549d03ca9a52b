"""Real processes of a job on loopback, for tests of watching."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType

from jaxdist._compat import host_coordination_service

_SECONDS = 60.0
# What each process of a test runs before its own text.
_BEGIN = """
import ctypes, logging, os, signal, sys, time
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxdist import errors
from jaxdist import _processes as processes
from jaxdist._processes import HERE, Waiter

index, count = int(sys.argv[1]), int(sys.argv[2])
processes.connect(
    coordinator_address=sys.argv[3],
    num_processes=count,
    process_id=index,
    cluster_detection_method="deactivate",
    coordinator_bind_address="127.0.0.1:0",
    heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=5,
)
process = processes.get_process_of_job()
processes.start_watching(process, processes.get_store(), processes.get_settings())
mesh = jax.make_mesh((count,), ("x",))
rows = NamedSharding(mesh, PartitionSpec("x"))
everywhere = NamedSharding(mesh, PartitionSpec())
add = jax.jit(lambda x: x.sum(0), out_shardings=everywhere)
calls = processes.CallOfAll("reduce")

def make(size):
    return jax.make_array_from_process_local_data(rows, np.ones((1, size), np.float32))

def reduce(x, seconds=None, step=None):
    with Waiter("the test's reduce", calls.name_next(), seconds, step) as waiter:
        total = add(x)
        waiter.wait([total])
    return total

def say(*what):
    print(*what, flush=True)

def expect(kind, do):
    began = time.monotonic()
    try:
        do()
    except kind as error:
        took = time.monotonic() - began
        say("CAUGHT", type(error).__name__, error.processes, f"{took:.1f}")
        say("FIRST", str(error).splitlines()[0])
        say("TEXT", repr(str(error)))
    # The device is free again.
    say("LOCAL", float(jnp.arange(4.0).sum()))

x = make(SIZE)
assert float(reduce(x).addressable_data(0)[0]) == count
"""


class Job:
    """Processes that run one text; each is ended when the context ends.

    Args:
        folder: Where their output is written.
        count: How many.
        script: What they run, after they have joined, and reduced once.
        size: Elements of an array. XLA computes small ones inside of the call that dispatches them.
        environment: More environment variables.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        count: int,
        script: str,
        size: int = 4096,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._folder = folder
        service = f"127.0.0.1:{find_free_port()}"
        self._service = host_coordination_service(
            service, count, heartbeat_seconds=10, shutdown_seconds=5
        )
        file = folder / "script.py"
        file.write_text(_BEGIN.replace("SIZE", str(size)) + script)
        more = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "XLA_FLAGS": "",
            **(environment or {}),
        }
        self.processes = []
        for index in range(count):
            with open(folder / f"{index}.txt", "w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(file), str(index), str(count), service],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **more},
                        cwd=os.getcwd(),
                    )
                )

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        self._service.shutdown()
        if error is not None:
            for index in range(len(self.processes)):
                print(f"--- process {index}\n{self.read(index)[-4000:]}")

    def read(self, index: int) -> str:
        """Return what a process has printed so far."""
        return (self._folder / f"{index}.txt").read_text()

    def wait_for(self, index: int, text: str) -> None:
        """Wait until a process has printed a text."""
        end = time.monotonic() + _SECONDS
        while text not in self.read(index):
            if time.monotonic() > end or self.processes[index].poll() not in (None, 0):
                raise AssertionError(f"process {index} did not print {text!r}")
            time.sleep(0.05)

    def wait(self, index: int) -> int:
        """Wait until a process has ended, and return its exit code."""
        return self.processes[index].wait(_SECONDS)

    def find(self, index: int, key: str) -> str:
        """Return the rest of the first line that a process printed after a word."""
        for line in self.read(index).splitlines():
            if line.startswith(f"{key} "):
                return line.removeprefix(f"{key} ")
        raise AssertionError(f"process {index} printed no line {key!r}")


def find_free_port() -> int:
    """Return a port that nothing uses."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
