"""A project of `jaxdist new` trains, passes its tests and has nothing that `jaxdist lint` finds."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jaxdist.cli import main

SMALL = ["data.examples=200", "training.epochs=2"]


def _run(folder: pathlib.Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("projects") / "flowers"
    assert main(["new", str(folder)]) == 0
    return folder


def test_the_script_trains_and_a_second_run_goes_on(project: pathlib.Path) -> None:
    first = _run(project, "train.py", *SMALL)
    assert first.count("epoch ") == 2
    second = _run(project, "train.py", *SMALL[:1], "training.epochs=3")
    assert [line.split()[:2] for line in second.splitlines()[:-1]] == [
        ["resumes", "after"],
        ["epoch", "3/3"],
    ]
    third = _run(project, "train.py", *SMALL[:1], "training.epochs=3").splitlines()
    assert third[0].startswith("all 3 epochs are trained: pass a higher epochs to train more (")
    assert third[1:] == second.splitlines()[-1:]


@pytest.mark.slow
def test_the_script_trains_in_two_processes(project: pathlib.Path) -> None:
    args = ["-m", "jaxdist", "launch", "-n", "2", "train.py", *SMALL, 'output.directory="two"']
    assert _run(project, *args).count("held out:") == 2


@pytest.mark.slow
def test_its_tests_pass(project: pathlib.Path) -> None:
    assert "3 passed" in _run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_its_notebook_runs(project: pathlib.Path) -> None:
    notebook: dict[str, Any] = json.loads((project / "flowers.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    (project / "cells.py").write_text("\n".join(cells))
    assert "the model has learned: True" in _run(project, "cells.py")


def test_nothing_in_it_is_what_the_guides_warn_of(
    project: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(project)]) == 0
    capsys.readouterr()


def test_the_command_lists_the_files(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "flowers"
    assert main(["new", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == [
        pathlib.Path(line).name for line in printed.splitlines()[:7]
    ]
    assert f"cd {folder} && python train.py" in printed
    assert [p.name for p in folder.parent.iterdir()] == ["flowers"]


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("my-flowers", "my_flowers"),
        ("2nd", "project_2nd"),
        ("class", "flowers"),
        ("é è", "Pass for instance flowers"),
    ],
)
def test_a_name_that_python_cannot_import_is_named(
    tmp_path: pathlib.Path, name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / name)]) == 2
    assert advice in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_replaced(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["new", str(tmp_path / "mine")]) == 0
    (tmp_path / "mine" / "model.py").write_text("mine")
    assert main(["new", str(tmp_path / "mine")]) == 2
    assert "which has files already" in capsys.readouterr().err
    assert (tmp_path / "mine" / "model.py").read_text() == "mine"
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file")]) == 2
    assert "which has files already" in capsys.readouterr().err


def test_an_empty_name_is_refused_and_writes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The name of the current folder would do for a project.
    folder = tmp_path / "flowers"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["new", ""]) == 2
    assert "NAME=''" in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file" / "flowers")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_project_at_a_file_address_is_printed_as_a_path(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my projects" / "flowers"
    assert main(["new", folder.as_uri()]) == 0
    *files, _, command = capsys.readouterr().out.splitlines()
    assert all(pathlib.Path(file).is_file() for file in files)
    assert command == f"Train: cd '{folder}' && python train.py"
