"""A Ray cluster on hosts of their own: its head on the first, a node on each."""

import contextlib
import importlib.util
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.hosts.clusters.daemons import start_daemon
from tests.hosts.hosts import Host, find_obstacle
from tests.launching.files.printed import clean_environment

_PORT = 6379
_SECONDS_TO_START = 120.0
# Paths of Ray's sockets have to be short.
_FOLDER = "/tmp/ray"


def find_missing() -> str:
    """Return why this machine cannot start Ray on hosts; an empty text where it can."""
    has_ray = importlib.util.find_spec("ray") is not None
    return find_obstacle() or ("" if has_ray else "Ray is not installed")


needs_ray = pytest.mark.skipif(bool(find_missing()), reason=find_missing())


def make_environment(head: Host) -> dict[str, str]:
    """Return variables with which programs on the first host find the cluster."""
    return {
        "RAY_ADDRESS": f"{head.address}:{_PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A token of this user would be asked for otherwise.
        "RAY_AUTH_MODE": "disabled",
        "JAX_PLATFORMS": "cpu",
    }


@contextlib.contextmanager
def start_ray(hosts: Sequence[Host], folder: pathlib.Path, cores: int = 2) -> Iterator[None]:
    """Start Ray on hosts, and end it with everything that it has started.

    Args:
        hosts: Where. The head is on the first.
        folder: For what the nodes print.
        cores: Cores of each node.
    """
    pathlib.Path(_FOLDER).mkdir(exist_ok=True)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    environment = clean_environment() | make_environment(hosts[0])
    with contextlib.ExitStack() as stack:
        for host in hosts:
            # A folder of its own, as on another machine.
            mount = ["mount", "-t", "tmpfs", "tmpfs", _FOLDER]
            subprocess.run(host.enter(mount), check=True, timeout=60)
            where = ["--address", f"{hosts[0].address}:{_PORT}"]
            own = dict(environment)
            if host is hosts[0]:
                where = ["--head", "--port", str(_PORT), "--dashboard-host", host.address]
                del own["RAY_ADDRESS"]
            command = [
                *(*ray, "start", "--block", "--disable-usage-stats", *where),
                *("--node-ip-address", host.address, "--num-cpus", str(cores)),
            ]
            stack.enter_context(start_daemon(host, command, own, folder / f"ray-{host.name}.out"))
        _wait_for_nodes(hosts, environment, folder)
        yield


def _wait_for_nodes(
    hosts: Sequence[Host], environment: Mapping[str, str], folder: pathlib.Path
) -> None:
    """Wait until the head knows all nodes."""
    program = "import ray; ray.init(log_to_driver=False); print('nodes', len(ray.nodes()))"
    deadline = time.monotonic() + _SECONDS_TO_START
    while True:
        done = subprocess.run(
            hosts[0].enter([sys.executable, "-c", program]),
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_START,
            check=False,
        )
        if f"nodes {len(hosts)}" in done.stdout:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("ray-*.out")))
            raise AssertionError(f"{done.stdout}{done.stderr[-2000:]}{logs}")
