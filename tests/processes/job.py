"""Jobs of real processes on loopback, for tests.

`run_job` runs a function in each process and returns what each of them did; `start_job` also
signals processes and reads what they print meanwhile. The coordination service is in the process of
the test, unless `service=False`, so that each process of the job may die.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxdist._compat import host_coordination_service
from tests.ports import find_free_ports
from tools import raises

ROOT = pathlib.Path(__file__).parents[2]
Target = str | Callable[..., Any]
Variables = Mapping[str, str | None]

# Variables of the process of the tests that would change a job.
_OURS = ("JAXDIST_", "TF_CONFIG", "XLA_FLAGS", "SLURM_", "KUBERNETES_")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one process did.

    `exit_code` is negative after a signal. `result` is what the function returned; `raised` and
    `error` are the name of the class and the traceback of an exception that left it.
    """

    index: int
    exit_code: int
    result: Any
    raised: str | None
    error: str | None
    stdout: str
    stderr: str
    timed_out: bool

    def describe(self) -> str:
        """Return all that is known, for the message of a test that fails."""
        late = ", killed because it took too long" if self.timed_out else ""
        return (
            f"--- process {self.index}: exit code {self.exit_code}{late}\n"
            f"{self.stdout}\n{self.stderr}"
        )


class Job:
    """Processes that run; `start_job` makes it."""

    def __init__(self, folder: pathlib.Path, pids: list[int], addresses: list[str]) -> None:
        self._folder = folder
        self._late: set[int] = set()
        self.pids = pids
        self.addresses = addresses

    def exit_code(self, index: int) -> int | None:
        """Return the exit code of a process, None while it runs."""
        path = self._folder / f"{index}.code"
        return int(path.read_text()) if path.exists() else None

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process and to the processes that it started in its group."""
        if self.exit_code(index) is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[index], number)

    def lines(self, index: int) -> list[str]:
        """Return the complete lines that a process has printed so far."""
        return self._read(index, "stdout").splitlines()

    def errors(self, index: int) -> str:
        """Return what a process has written to its standard error so far."""
        return self._read(index, "stderr")

    def wait_for_line(self, index: int, part: str, timeout: float = 30.0) -> str:
        """Wait until a process prints a line with `part`, and return the line."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.exit_code(index) is not None
            for line in self.lines(index):
                if part in line:
                    return line
            if ended or time.monotonic() > deadline:
                why = "ended" if ended else f"had {timeout} s, but"
                raise AssertionError(
                    f"process {index} {why} without a line with {part!r}\n{self._describe()}"
                )
            time.sleep(0.005)

    def wait_for_end(self, index: int, timeout: float) -> None:
        """Wait until a process has ended, or the time has passed."""
        deadline = time.monotonic() + timeout
        while self.exit_code(index) is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def wait(self, timeout: float = 60.0) -> list[Outcome]:
        """Wait for the end of all processes. Those that take longer are killed."""
        deadline = time.monotonic() + timeout
        indices = range(len(self.pids))
        while any(self.exit_code(i) is None for i in indices) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._late.update(i for i in indices if self.exit_code(i) is None)
        self.end()
        return [self._outcome(i) for i in indices]

    def end(self) -> None:
        """Kill all processes that still run, and wait until they have ended."""
        left = [i for i in range(len(self.pids)) if self.exit_code(i) is None]
        for index in left:
            # Its stack helps whoever reads the failure.
            self.kill(index, signal.SIGUSR1)
        if left:
            time.sleep(0.1)
        for index in left:
            self.kill(index)
        deadline = time.monotonic() + 20
        while any(self.exit_code(i) is None for i in left):
            if time.monotonic() > deadline:
                raise AssertionError(f"processes {left} did not end after SIGKILL")
            time.sleep(0.005)

    def _read(self, index: int, name: str) -> str:
        path = self._folder / f"{index}.{name}"
        return path.read_bytes().decode(errors="replace") if path.exists() else ""

    def _outcome(self, index: int) -> Outcome:
        path = self._folder / f"{index}.result"
        stored: tuple[bool, Any] = (True, None)
        if path.exists():
            stored = pickle.loads(path.read_bytes())
        returned, content = stored
        raised, error = (None, None) if returned else content
        code = self.exit_code(index)
        assert code is not None
        return Outcome(
            index=index,
            exit_code=code,
            result=content if returned else None,
            raised=raised,
            error=error,
            stdout=self._read(index, "stdout"),
            stderr=self._read(index, "stderr"),
            timed_out=index in self._late,
        )

    def _describe(self) -> str:
        return "\n".join(
            f"--- process {i}: exit code {self.exit_code(i)}\n"
            f"{self._read(i, 'stdout')}\n{self.errors(i)}"
            for i in range(len(self.pids))
        )


@contextlib.contextmanager
def start_job(
    target: Target,
    count: int,
    *,
    args: tuple[Any, ...] = (),
    devices: int = 1,
    env: Variables | Callable[[int], Variables] | None = None,
    config: Mapping[str, Any] | None = None,
    optimized: bool = False,
    service: bool = True,
    heartbeat: int = 10,
    shutdown: int = 10,
    holders: Sequence[int] = (),
    addresses: Sequence[str] = (),
) -> Iterator[Job]:
    """Start processes that call `target(*args)`; they are killed when the block ends.

    Args:
        target: A function at the top of a module, its name as `"tests.room.steps:train"`, or the
            source of a script of more than one line, which leaves its result in `result`.
        count: Number of processes.
        args: Arguments of the function; they are pickled.
        devices: CPU devices of each process.
        env: Variables that are added (None removes one), or a function of the process' number that
            returns them. JAX has been imported, so options of JAX go to `config`.
        config: Options of JAX, such as `{"jax_enable_x64": True}`.
        optimized: Whether machine code is optimized as users have it.
        service: Whether the coordination service is here; otherwise process 0 hosts it.
        heartbeat: After how many seconds without news the service counts a process as dead.
        shutdown: How many seconds the processes wait for each other when they leave.
        holders: For jobs on hosts of their own, the `holder` of the host of each process; the
            service is then in process 0.
        addresses: The addresses in `TF_CONFIG`; without any, free ports of 127.0.0.1.
    """
    with (
        tempfile.TemporaryDirectory(prefix="jaxdist-job-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = pathlib.Path(name)
        port, *ports = find_free_ports(count + 1)
        addresses = addresses or [f"127.0.0.1:{p}" for p in ports]
        common: dict[str, str | None] = {}
        if service and not holders:
            common["JAXDIST_SERVICE"] = f"127.0.0.1:{port}"
            hosted = host_coordination_service(f"127.0.0.1:{port}", count, heartbeat, shutdown)
            stack.callback(hosted.shutdown)
        words = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        (folder / "arguments").write_bytes(pickle.dumps((words, args)))
        options: dict[str, Any] = {"jax_num_cpu_devices": devices}
        if not optimized and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
            options["jax_disable_most_optimizations"] = True
        options |= config or {}
        job = Job(folder, [], list(addresses))
        stack.callback(job.end)
        for index in range(count):
            task = {"type": "worker", "index": index}
            tf_config = json.dumps({"cluster": {"worker": [*addresses]}, "task": task})
            own = env(index) if callable(env) else (env or {})
            request = {
                "environment": _environment({**common, "TF_CONFIG": tf_config, **own}),
                "config": options,
                "holder": holders[index] if holders else None,
                "arguments": str(folder / "arguments"),
                **{k: str(folder / f"{index}.{k}") for k in ("stdout", "stderr", "result", "code")},
            }
            job.pids.append(fork_server().start(request))
        yield job


def run_job(target: Target, count: int, *, timeout: float = 120.0, **how: Any) -> list[Outcome]:
    """Run processes to their end, at most `timeout` seconds; arguments as of `start_job`."""
    with start_job(target, count, **how) as job:
        return job.wait(timeout)


def results_of_job(target: Target, count: int, *, timeout: float = 120.0, **how: Any) -> list[Any]:
    """Run processes that all have to end well, and return what their functions returned."""
    outcomes = run_job(target, count, timeout=timeout, **how)
    if any(outcome.exit_code or outcome.timed_out for outcome in outcomes):
        raise AssertionError("\n".join(outcome.describe() for outcome in outcomes))
    return [outcome.result for outcome in outcomes]


def _environment(extra: Variables) -> dict[str, str]:
    left = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return {k: v for k, v in {**left, **extra}.items() if v is not None}


class _ForkServer:
    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(
                {
                    "JAX_PLATFORMS": "cpu",
                    "PYTHONPATH": os.pathsep.join(paths),
                    raises.VARIABLE: os.environ.get(raises.VARIABLE),
                }
            ),
        )
        self._answer("ready")

    def start(self, request: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer("the pid of a process"))

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _answer(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the fork server ended instead of answering with {what}")
        return line.strip()


@functools.cache
def _first_fork_server(pid: int) -> _ForkServer:
    return _ForkServer()


def fork_server() -> _ForkServer:
    """Return the fork server of this process; it is started again if it has ended."""
    # For each process: workers of pytest-xdist, and processes of tests that start jobs themselves.
    server = _first_fork_server(os.getpid())
    if server.is_alive():
        return server
    _first_fork_server.cache_clear()
    return _first_fork_server(os.getpid())
