"""A process that has imported JAX, and starts copies of itself for tests.

Importing JAX takes seconds, a fork of a process that has imported it some milliseconds. The server
never starts a backend of JAX, a gRPC channel or a thread of Python, none of which survives a fork.

It reads one request from each line of its standard input and writes the pid of the process that it
started. It ends with its input, and its children with it.
"""

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pathlib
import pickle
import selectors
import signal
import sys
import textwrap
import traceback
import warnings
from typing import Any

import flax.nnx
import jax
import numpy as np
import optax

from tools import raises

# Not where pytest only imports this file to look for doctests.
if raises.VARIABLE in os.environ and "jaxdist" not in sys.modules:
    from tools import record_raises

    # Errors that processes of jobs raise count as reached by the test that started the job.
    record_raises.install(raises.PACKAGE, pathlib.Path(os.environ[raises.VARIABLE]))

import jaxdist
import jaxdist.testing

# What processes need; not the server itself.
PRELOADED = (flax.nnx, jax, np, optax, jaxdist, jaxdist.testing)


def serve() -> None:
    """Start processes until the input ends. Returns in each started process, too."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    codes: dict[int, str] = {}
    selector = selectors.DefaultSelector()
    selector.register(wake, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if wake in ready:
            os.read(wake, 4096)
        _reap(codes)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            request = json.loads(line)
            streams = _open_streams(request)
            pid = os.fork()
            if pid == 0:
                selector.close()
                os.close(wake)
                os.close(woken)
                _run(request, streams)
                return
            for stream in streams:
                os.close(stream)
            # Here and in the child: whoever is first. The caller signals the group at once.
            _own_group(pid)
            codes[pid] = request["code"]
            print(pid, flush=True)


def _open_streams(request: dict[str, Any]) -> tuple[int, int, int]:
    """Open what the process gets as standard input, output and error.

    Here, so that a caller that names its pipes by `/proc` may close them when it gets the answer.
    """
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return (
        os.open(request.get("stdin", os.devnull), os.O_RDONLY),
        os.open(request["stdout"], write),
        os.open(request["stderr"], write),
    )


def _own_group(pid: int) -> None:
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # It has a group already, or has ended.


def _reap(codes: dict[int, str]) -> None:
    while codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        write_whole(codes.pop(pid), str(os.waitstatus_to_exitcode(status)).encode())


def write_whole(path: str, content: bytes) -> None:
    """Write a file that readers see complete or not at all."""
    part = pathlib.Path(path + ".part")
    part.write_bytes(content)
    part.rename(path)


def _run(request: dict[str, Any], streams: tuple[int, int, int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _own_group(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The server has read ahead from its own input.
    sys.stdin = os.fdopen(0)
    if request.get("holder"):
        _enter_host(request["holder"])
    # Where the process is when it takes too long.
    faulthandler.register(signal.SIGUSR1)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, value in request["config"].items():
        jax.config.update(name, value)
    try:
        target, arguments = pickle.loads(pathlib.Path(request["arguments"]).read_bytes())
        result = _call(target, arguments)
        write_whole(request["result"], pickle.dumps((True, result)))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        write_whole(request["result"], pickle.dumps((False, (type(error).__name__, text))))
        raise


def _enter_host(holder: int) -> None:
    """Go on with the network, name and files of the host that a process holds."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.getcwd()
    for kind in ("net", "uts", "mnt"):
        opened = os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY)
        if libc.setns(opened, 0):
            raise OSError(ctypes.get_errno(), f"setns of {kind} failed")
        os.close(opened)
    os.chdir(here)


def _call(target: str, arguments: tuple[Any, ...]) -> Any:
    if "\n" in target:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(textwrap.dedent(target), "<job>", "exec"), names)
        return names.get("result")
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found(*arguments)


if __name__ == "__main__":
    # Python warns of a fork with threads, and counts those of NumPy, which handles forks.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    gc.freeze()
    serve()
