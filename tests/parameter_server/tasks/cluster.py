"""A cluster of real processes on loopback, whose tasks tests kill and start again."""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tests.ports import find_free_ports
from tests.processes.forked_script import ForkedScript

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = pathlib.Path(__file__).with_name("job_script.py")
SECRET = "a secret of this test, long enough"


def start_command(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command, with its standard error in its standard output."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=dict(environment),
    )


class Task:
    """One process of the cluster."""

    def __init__(self, process: ForkedScript | subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._news.put(line)
        self._news.put(None)

    def wait_for(self, event: str, seconds: float = 120) -> dict[str, Any]:
        """Return what the task says of an event."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no {event!r} in:\n{''.join(self.lines)}"
            if line.startswith("{") and json.loads(line)["event"] == event:
                return json.loads(line)

    def tell(self) -> None:
        """Let the task go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End the process at once, also if it is stopped."""
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def wait(self, seconds: float = 60) -> str:
        """Wait for its end, and return what it wrote."""
        self.process.wait(seconds)
        self._reader.join(30)
        return "".join(self.lines)


class Cluster:
    """The tasks of a job that runs a script. Each is started by name, such as `ps 0`."""

    def __init__(
        self,
        *arguments: str,
        script: pathlib.Path = SCRIPT,
        ps: int = 1,
        workers: int = 2,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.script, self.arguments = script, arguments
        ports = iter(find_free_ports(ps + workers + 1))
        self.addresses = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for job, count in {"ps": ps, "worker": workers, "chief": 1}.items()
        }
        self.environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "XLA_FLAGS": "",
            "PYTHONUNBUFFERED": "1",
            "JAXDIST_SECRET": SECRET,
            "JAXDIST_JOIN_SECONDS": "90",
            **(env or {}),
        }
        self.tasks: dict[str, Task] = {}

    def start(self, name: str, env: Mapping[str, str] | None = None) -> Task:
        """Start a task; one that was killed starts again at the same address."""
        job, _, index = name.partition(" ")
        task = {"type": job, "index": int(index)}
        config = json.dumps({"cluster": self.addresses, "task": task})
        environment = {**self.environment, "TF_CONFIG": config, **(env or {})}
        if name in self.tasks:
            self.tasks[name].close()
        made = self.tasks[name] = Task(ForkedScript(self.script, [*self.arguments], environment))
        return made

    def start_all(self) -> Task:
        """Start all tasks; return the chief."""
        for job, addresses in self.addresses.items():
            for index in range(len(addresses)):
                self.start(f"{job} {index}")
        return self.tasks["chief 0"]

    def close(self) -> None:
        """Kill all tasks."""
        for task in self.tasks.values():
            task.close()


@contextlib.contextmanager
def make_cluster(*arguments: str, **options: Any) -> Iterator[Cluster]:
    """Make a cluster, whose tasks are killed at the end of the block."""
    cluster = Cluster(*arguments, **options)
    try:
        yield cluster
    finally:
        cluster.close()
