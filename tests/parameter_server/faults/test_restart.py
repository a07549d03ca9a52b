"""A killed server serves again soon, with at most one snapshot period's updates missing."""

import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from jaxdist._parameter_server.protocol import GetStatistics, Hello
from jaxdist._parameter_server.transport import connect
from jaxdist._parameter_server.variables.remote_server import RemoteServer
from jaxdist.errors import PSUnavailableError
from tests.launching.launcher import start_launcher, wait_until
from tests.parameter_server.faults.table import (
    SCRIPT,
    START,
    find_processes,
    kill_what_is_left,
    read,
    wait_for_file,
)
from tests.parameter_server.tasks.cluster import SECRET

PERIOD = 1.0
KILLS = 1
# Of the processor, besides those of importing jaxdist, which differ between machines.
SECONDS = 2.0
# A snapshot takes long where others write, too.
SLACK = 0.5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_server_serves_again_soon_and_what_is_lost_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXDIST_SECRET", SECRET)
    env: dict[str, str | None] = {
        "FAULT_FOLDER": str(tmp_path),
        "FAULT_SNAPSHOT_SECONDS": str(PERIOD),
        "JAXDIST_SECRET": SECRET,
        "JAXDIST_JOIN_SECONDS": str(START),
        "JAX_PLATFORMS": "cpu",
    }
    how = ("--ps", "1", "--workers", "2", "--grace-seconds", "1", SCRIPT)
    with kill_what_is_left(tmp_path), start_launcher(*how, env=env) as job:
        wait_for_file(tmp_path, "idle", job)
        (tmp_path / "go on").touch()
        channel = connect(read(tmp_path, "pid ps 0 1")["address"], layer="grpc", name="ps 0")
        server = RemoteServer(channel, 0)
        missing = 0
        for start in range(1, KILLS + 1):
            pid = read(tmp_path, f"pid ps 0 {start}")["pid"]
            seen = _watch(server, PERIOD * 2.5)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            wait_for_file(tmp_path, f"pid ps 0 {start + 1}", job)
            pid = read(tmp_path, f"pid ps 0 {start + 1}")["pid"]
            wait_until(lambda: _serves(server), START)
            # Time in which other processes had the processors counts for nobody.
            others = _read_waiting_seconds(pid)
            seconds = time.monotonic() - killed
            print(f"serves again after {seconds:.2f} s, {seconds - others:.2f} s without others")
            imports = _measure_import()
            assert seconds - others < imports + SECONDS, (seconds, others, imports)
            restored = _read_snapshot(server)["applied"]
            old = [applied for at, applied in seen if at < killed - PERIOD - SLACK]
            assert restored >= old[-1], (restored, seen)
            missing += seen[-1][1] - restored
        (tmp_path / "reached").touch()
        (outcome,) = job.wait(START)
        channel.close()
    said = outcome.describe()
    assert outcome.exit_code == 0, said
    wait_until(lambda: not find_processes(tmp_path))
    result = read(tmp_path, "result")
    # The counter of the server proves the number that is reported.
    assert result["count"] == result["applied"] == result["scheduled"] - result["lost"], result
    # What was under way at the kill ran again, and is not lost.
    assert result["lost"] >= missing - 2 * KILLS, (missing, result)


def _watch(server: RemoteServer, seconds: float) -> list[tuple[float, int]]:
    """Return how many updates were applied, and when, over some seconds."""
    seen: list[tuple[float, int]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        applied = server.call(GetStatistics()).applied
        seen.append((time.monotonic(), applied))
        time.sleep(0.01)
    return seen


def _read_snapshot(server: RemoteServer) -> Any:
    return server.call(Hello()).snapshot


def _serves(server: RemoteServer) -> bool:
    try:
        return _read_snapshot(server) is not None
    except PSUnavailableError:
        return False


def _measure_import() -> float:
    """Return how many seconds of the processor a new process needs to import what a server is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = "import jaxdist; jaxdist.Server; jaxdist.ParameterServerStrategy"
    subprocess.run([sys.executable, "-c", imports], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _read_waiting_seconds(pid: int) -> float:
    """Return how long the main thread of a process has waited for a processor."""
    return int(pathlib.Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
