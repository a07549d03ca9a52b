"""`--print skypilot`: a task of SkyPilot's form, whose processes meet."""

import contextlib
import os
import pathlib
from typing import Any

import jsonschema
import pytest

from tests.launching.files.printed import (
    ROOT,
    SCRIPT,
    add_program,
    check_schema,
    check_syntax,
    clean_environment,
    print_file,
    read_documents,
    start_bash,
)
from tests.ports import find_free_ports

PATH = os.path.relpath(SCRIPT, ROOT)


@pytest.fixture(autouse=True)
def in_the_folder_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _read(text: str) -> Any:
    (task,) = read_documents(text)
    check_schema(task, "skypilot")
    check_syntax(task["run"])
    return task


def test_every_option_is_in_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-n", "4", "--gpu", "H100", "--cpus", "8", "--memory", "16", "--hosts", "2",
            "--image", "a/b:1", "--restarts", "3", "--devices-per-process", "2"]  # fmt: skip
    text = print_file(capsys, *argv, "--print", "skypilot", SCRIPT, "a b")
    task = _read(text)
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "cpus": "16+", "memory": "32+", "accelerators": "H100:4", "image_id": "docker:a/b:1",
        "job_recovery": {"max_restarts_on_errors": 3},
    }  # fmt: skip
    assert f"python {PATH} 'a b' &" in task["run"]
    assert "setup" not in task
    assert "sky jobs launch" in text


def test_without_options_the_task_installs_jaxdist_on_one_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = _read(print_file(capsys, "-n", "2", "--print", "skypilot", PATH))
    assert task["num_nodes"] == 1
    assert task["setup"].split()[:2] == ["pip", "install"]
    assert "resources" not in task


def test_the_schema_refuses_what_skypilot_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    task = _read(print_file(capsys, "-n", "2", "--print", "skypilot", PATH))
    task["nodes"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nodes"):
        check_schema(task, "skypilot")


def test_each_process_of_a_machine_gets_gpus_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    argv = ["-n", "4", "--gpu", "H100", "--hosts", "2", "--devices-per-process", "2"]
    task = _read(print_file(capsys, *argv, "--print", "skypilot", PATH))
    (tmp_path / "python").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $TF_CONFIG"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    with start_bash(task["run"], environment) as running:
        output, _ = running.communicate(timeout=20)
    workers = ", ".join(f'"10.0.0.{i}:{port}"' for i in (1, 2) for port in (8470, 8471))
    assert sorted(output.splitlines()) == [
        f'{gpus} {{"cluster": {{"worker": [{workers}]}}, '
        f'"task": {{"type": "worker", "index": {index}}}}}'
        for gpus, index in (("0,1", 2), ("2,3", 3))
    ]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_processes_of_a_task_meet(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], hosts: int
) -> None:
    argv = ["-n", "2", "--hosts", str(hosts), "--devices-per-process", "2"]
    task = _read(print_file(capsys, *argv, "--print", "skypilot", PATH, "x"))
    add_program(tmp_path, "python", [])
    (port,) = find_free_ports(1)
    run = task["run"].replace("8470", str(port))
    # All of 127.0.0.0/8 is this machine.
    environment = {
        **clean_environment(),
        **task["envs"],
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "\n".join(f"127.0.0.{i + 1}" for i in range(hosts)),
    }
    outputs = []
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(start_bash(run, {**environment, "SKYPILOT_NODE_RANK": str(rank)}))
            for rank in range(hosts)
        ]
        for node in nodes:
            outputs.append(node.communicate(timeout=90)[0])
            assert node.returncode == 0, "\n".join(outputs)
    lines = [line for line in "".join(outputs).splitlines() if line.startswith("process ")]
    said = "total 4.0 by TFConfigClusterResolver ['x']"
    assert sorted(lines) == [f"process {i} of 2 {said}" for i in range(2)], outputs
