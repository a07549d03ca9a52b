"""`jaxdist resolve` as a command."""

import json
import os
import subprocess
import sys

import pytest

from jaxdist.cli import main
from tests.ports import find_free_ports


@pytest.fixture(autouse=True)
def _nothing_of_a_job_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "TPU_", "JOB", "TF_CONFIG")) or "proxy" in name.lower():
            monkeypatch.delenv(name)


def _set_cluster(monkeypatch: pytest.MonkeyPatch, addresses: list[str], index: int) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve"]) == 0
    told = capsys.readouterr().out
    assert "process 0 of 1" in told
    assert "Nothing looks wrong." in told


def test_two_processes_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = find_free_ports(2)
    _set_cluster(monkeypatch, [f"127.0.0.1:{first}", f"127.0.0.1:{second}"], 1)
    assert main(["resolve"]) == 0
    told = capsys.readouterr().out
    assert f"worker 1, process 1 of 2, 127.0.0.1:{second}" in told
    assert f"worker 0, 127.0.0.1:{first}" in told
    assert main(["resolve", "--probe"]) == 1
    assert f"warning: Nothing listens at 127.0.0.1:{first}" in capsys.readouterr().out
    # What is given counts more than the variable.
    assert main(["resolve", "--from", "tf_config", "--task-id", "0"]) == 0
    assert "process 0 of 2" in capsys.readouterr().out


def test_errors_end_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_cluster(monkeypatch, ["127.0.0.1:1", "127.0.0.1:1"], 0)
    assert main(["resolve"]) == 2
    assert "error: worker 0 and worker 1 share one address" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["resolve", "--from", "slurm"]) == 2
    assert "srun python script.py" in capsys.readouterr().err
    assert main(["resolve", "--from", "gce"]) == 2
    assert main(["resolve", "--from", "kubernetes", "--label", "a=b"]) == 2


def test_jax_looks_at_no_device() -> None:
    code = (
        "import sys, jaxdist.cli; code = jaxdist.cli.main(['resolve'])\n"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
