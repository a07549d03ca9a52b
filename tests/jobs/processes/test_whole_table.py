"""`configs/embedding_parameter_server.toml` as it is, by the processes of `jaxdist launch`."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "embedding_parameter_server.toml"
MIB = 2**20
# What a worker may need at its peak; the table has 1 GiB.
MOST_OF_WORKER = 400 * MIB
PARTS = {"chief": 1, "ps": 2, "worker": 2}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.timeout(600)
def test_a_table_of_1_gib_on_two_servers_leaves_a_worker_below_400_mib(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    places = (f"output.directory={tmp_path}", f"checkpoint.directory={tmp_path / 'checkpoints'}")
    command = [sys.executable, "-m", "jaxdist", "launch"]
    for job, count in PARTS.items():
        command += [f"--{'workers' if job == 'worker' else job}", str(count)]
    command += ["train", str(CONFIG), *(x for place in places for x in ("--set", place))]
    command += ["--set", "output.picture="]
    peaks: dict[str, int] = {}
    lines: list[str] = []
    with _start(command) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            lines.append(line)
            if "saved" in line:
                # From here on every task has done all its work.
                peaks.clear()
            peaks |= _read_peaks(launcher.pid)
        assert launcher.wait(60) == 0, "".join(lines)
    names = {f"{job} {n}" for job, count in PARTS.items() for n in range(count)}
    assert peaks.keys() == names, "".join(lines)
    record_property("peak memory in bytes", peaks)
    print({name: f"{peak // MIB} MiB" for name, peak in sorted(peaks.items())})
    # The whole table was there, on the servers, and it learned.
    table = np.load(tmp_path / "checkpoints" / "tables" / "400" / "table.npy", mmap_mode="r")
    assert (table.shape, table.dtype, table.nbytes) == ((2**22, 64), np.float32, 2**30)
    found = json.loads((tmp_path / "metrics.json").read_text())
    counts = found["parameter_servers"]
    assert (counts["scheduled"], counts["applied"], counts["lost"]) == (400, 400, 0)
    assert np.mean(found["losses"][-50:]) < 0.8 * np.mean(found["losses"][:50])
    for name, peak in peaks.items():
        if name.startswith("ps"):
            assert peak > table.nbytes // 2
        if name.startswith("worker"):
            assert peak < MOST_OF_WORKER, peaks


@contextlib.contextmanager
def _start(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    # What users have: the processes of tests have other settings.
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            yield launcher
        finally:
            # It ends its tasks; one that has ended is not signalled.
            launcher.terminate()


def _read_peaks(launcher: int) -> dict[str, int]:
    """Return the largest resident memory so far of each task that a launcher has started."""
    found: dict[str, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes end while they are read.
        with contextlib.suppress(OSError):
            status = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            if int(status["PPid"]) != launcher or "VmHWM" not in status:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
            (config,) = [x[10:] for x in variables if x.startswith(b"TF_CONFIG=")]
            task = json.loads(config)["task"]
            found[f"{task['type']} {task['index']}"] = int(status["VmHWM"].split()[0]) * 1024
    return found
