"""Programs that run on a host in the background."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tests.hosts.hosts import Host


@contextlib.contextmanager
def start_daemon(
    host: Host, command: Sequence[str], environment: Mapping[str, str], output: pathlib.Path
) -> Iterator[None]:
    """Start a program; it ends with this process, and all that it has started ends with it.

    A namespace of processes ends with its first process, and that one with this process.
    """
    nested = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with output.open("w") as file:
        process = subprocess.Popen(
            host.enter(["setpriv", "--pdeathsig", "KILL", *nested, *command]),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
