"""`jaxdist trace`: its table, its file, and its errors."""

import glob
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxdist import errors, tpu
from jaxdist.cli import main

DIGITS = "configs/digits_mirrored.toml"
SMALL = ["--set", "model.channels=[4]", "--set", "data.batch_size=16"]
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def run_trace(*arguments: str, platforms: str | None) -> str:
    """Run the command in a process of its own, and return what it prints.

    Other tests of this process may have loaded libtpu.
    """
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    if platforms is not None:
        environment["JAX_PLATFORMS"] = platforms
    command = [sys.executable, "-m", "jaxdist", "trace", DIGITS, *SMALL, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trace_prints_where_the_time_of_a_step_goes_and_leaves_the_profile(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "profile"
    out = run_trace("--steps", "2", "--directory", str(folder), platforms="cpu")
    first = re.match(r"Profile of digits: 2 steps on 8 devices, ([\d.,]+) (\w+) a step\n", out)
    assert first is not None
    step = float(first[1].replace(",", "")) * _UNITS[first[2]]
    table = out.split("Longest operations")[0]
    rows = re.findall(r"\n  ([^\d\n]+?) {2,}([\d.,]+) (s|ms|us) ", table)
    times = {name: float(value.replace(",", "")) * _UNITS[unit] for name, value, unit in rows}
    assert {"matrix products", "collectives", "host: dispatch"} <= {*times}
    # Three digits of each are printed.
    assert sum(times.values()) == pytest.approx(step, rel=0.02)
    [profile] = folder.rglob("perfetto_trace.json.gz")
    assert str(profile) in out
    # The file for TensorBoard.
    assert [*folder.rglob("*.xplane.pb")]


def test_trace_starts_where_libtpu_is_installed_and_no_tpu_is(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("libtpu")
    out = run_trace("--steps", "1", "--directory", str(tmp_path), platforms=None)
    assert "Profile of digits: 1 step on 8 devices" in out


@pytest.mark.skipif(bool(glob.glob("/dev/accel*")), reason="the profiler works with a TPU")
def test_trace_refuses_a_process_that_has_loaded_libtpu(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("libtpu")
    tpu.system_of("described:v5e:2x2")
    # The profiler would end the process with a signal.
    assert main(["trace", DIGITS, "--directory", str(tmp_path)]) == 2
    assert "Run the command in a process of its own" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("steps", ["0", "-1", "1001"])
def test_trace_refuses_a_number_of_steps(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", DIGITS, "--steps", steps]) == 2
    assert f"--steps {steps} was given.\n\n--steps is a number" in capsys.readouterr().err


def test_trace_refuses_a_job_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnsupportedError, match="whose job has several processes"):
        main(["trace", "configs/digits_parameter_server.toml", "--traceback"])
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(errors.UnsupportedError, match="whose job has several processes"):
        main(["trace", "configs/digits_multi_worker.toml", "--traceback"])
