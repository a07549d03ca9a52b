"""The driver's side of an arm: its process, and the pipes to it."""

import dataclasses
import json
import os
import pathlib
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


class ArmError(RuntimeError):
    """An arm failed, ended or hung; the message has the tail of what it printed."""


class ArmProcess:
    """A long-lived child that answers JSON lines; leaving the `with` block ends it.

    Args:
        python: Interpreter to run.
        devices: CPU devices that JAX shall show in it, or None where there is no JAX.
        environ: Environment to start from.
    """

    def __init__(
        self, python: str, *, devices: int | None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")
        self._buffer = b""
        self._child = subprocess.Popen(
            [python, "-m", "benchmarks._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=_environment(environ, devices),
            # Ctrl-C is the driver's to handle: it ends the children in order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def call(self, function: Callable[..., Any], timeout_s: float = 600, **params: Any) -> Any:
        """Call a module-level function in the child; its result must be JSON."""
        return self.ask({"call": name_of(function), "params": params}, timeout_s)

    def make(self, function: Callable[..., Any], **params: Any) -> None:
        """Build the child's loop."""
        OneLoop(self, "").make(function, **params)

    def burst(self, steps: int, timeout_s: float = 600) -> tuple[float, float]:
        """Run the loop; wall and process CPU time in seconds per step."""
        return OneLoop(self, "").burst(steps, timeout_s)

    def facts(self) -> dict[str, Any]:
        """What the loop says of itself."""
        return OneLoop(self, "").facts()

    def ask(self, command: dict[str, Any], timeout_s: float) -> Any:
        """Send one command and wait for its answer."""
        self.send(command)
        return self.answer(command, timeout_s)

    def send(self, command: dict[str, Any]) -> None:
        """Send one command."""
        stdin = self._child.stdin
        if stdin is None or stdin.closed:
            raise ArmError("this arm has been ended already")
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise ArmError(self._post_mortem(command)) from None

    def has_answer(self, timeout_s: float) -> bool:
        """Whether something comes within that time: an answer, or the end of the child."""
        stdout = self._child.stdout
        return stdout is not None and bool(select.select([stdout], [], [], timeout_s)[0])

    def answer(self, command: dict[str, Any], timeout_s: float) -> Any:
        """Wait for the answer to the command that was sent."""
        answer = json.loads(self._line(command, timeout_s))
        if "error" in answer:
            raise ArmError(f"{command} failed:\n{answer['error']}")
        return answer["value"]

    def _line(self, command: dict[str, Any], timeout_s: float) -> bytes:
        stdout = self._child.stdout
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if stdout is None or left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise ArmError(f"{command} gave no answer within {timeout_s} s")
            read = os.read(stdout.fileno(), 1 << 16)
            if not read:
                raise ArmError(self._post_mortem(command))
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _post_mortem(self, command: dict[str, Any]) -> str:
        code = self._child.wait(10)
        self._log.seek(0)
        tail = self._log.read()[-2000:]
        return f"the arm's process ended with code {code} at {command}:\n{tail}"

    def close(self) -> None:
        """End the child: politely at first, then by force. Closing twice is fine."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            self._child.wait(0.5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._log.close()

    def __enter__(self) -> "ArmProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class OneLoop:
    """One of several loops that a process holds."""

    process: ArmProcess
    name: str

    def make(self, function: Callable[..., Any], **params: Any) -> None:
        """Build it."""
        command = {"make": name_of(function), "params": params, "loop": self.name}
        self.process.ask(command, 600)

    def burst(self, steps: int, timeout_s: float = 600) -> tuple[float, float]:
        """Run it; wall and process CPU time in seconds per step."""
        spent = self.process.ask({"burst": steps, "loop": self.name}, timeout_s)
        return spent["wall"] / steps, spent["cpu"] / steps

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        found: dict[str, Any] = self.process.ask({"facts": True, "loop": self.name}, 60)
        return found


def _environment(environ: Mapping[str, str], devices: int | None) -> dict[str, str]:
    # JAX sizes a thread pool from NPROC, and XLA_FLAGS could ask for another number of devices:
    # an arm gets neither from outside.
    kept = {k: v for k, v in environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    kept["JAX_PLATFORMS"] = "cpu"
    kept["CUDA_VISIBLE_DEVICES"] = "-1"
    # What was compiled in an earlier run must not be found again.
    kept["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    kept["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if devices is not None:
        kept["JAX_NUM_CPU_DEVICES"] = str(devices)
    return kept


def name_of(function: Callable[..., Any]) -> str:
    """What a child calls a function of a module."""
    return f"{function.__module__}:{function.__qualname__}"
