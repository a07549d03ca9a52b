"""A script in a process of its own, as by `python script.py`, forked after JAX is imported."""

import contextlib
import json
import os
import pathlib
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from tests.processes.job import fork_server

# JAX reads them when it is imported, which the fork server has done before.
_OPTIONS = {"JAX_NUM_CPU_DEVICES": "jax_num_cpu_devices"}


def run_as_main(path: str, arguments: list[str]) -> None:
    """Run a script in this process as if it had been started."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(pathlib.Path(path).parent))
    runpy.run_path(path, run_name="__main__")


class ForkedScript:
    """A running script; it has what tests use of `subprocess.Popen`.

    Its standard error goes into its standard output.
    """

    def __init__(
        self, script: pathlib.Path, arguments: list[str], environment: Mapping[str, str]
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxdist-script-")
        self._code = pathlib.Path(self._folder.name) / "code"
        given = pathlib.Path(self._folder.name) / "arguments"
        target = f"{run_as_main.__module__}:{run_as_main.__qualname__}"
        given.write_bytes(pickle.dumps((target, (str(script), arguments))))
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        output = f"/proc/{os.getpid()}/fd/{its_output}"
        options = {own: environment[name] for name, own in _OPTIONS.items() if name in environment}
        self.returncode: int | None = None
        self.pid = fork_server().start(
            {
                "environment": dict(environment),
                "config": {name: json.loads(value) for name, value in options.items()},
                "arguments": str(given),
                "stdin": f"/proc/{os.getpid()}/fd/{its_input}",
                "stdout": output,
                "stderr": output,
                "result": str(given.with_name("result")),
                "code": str(self._code),
            }
        )
        os.close(its_input)
        os.close(its_output)
        self.stdin = os.fdopen(to_it, "w")
        self.stdout = os.fdopen(from_it, errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
            self._folder.cleanup()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end, and return the exit code."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["the script"], timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        self.send_signal(signal.SIGKILL)
