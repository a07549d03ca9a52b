"""The configurations and notebooks that come with jaxdist, by name and as copies."""

import json
import os
import pathlib
import re
import zipfile

import pytest

from jaxdist import jobs
from jaxdist._examples import copy_examples, find, find_config, list_configs, list_notebooks
from jaxdist.cli import main
from jaxdist.errors import ArgumentError, ConfigError
from tests.test_documentation import ROOT, read_links

CONFIGS = sorted(str(p.relative_to(ROOT / "configs")) for p in (ROOT / "configs").rglob("*.toml"))
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").iterdir())


def _list_files(folder: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_every_configuration_and_notebook_of_the_checkout_has_a_name() -> None:
    assert sorted(list_configs()) == [name.removesuffix(".toml") for name in CONFIGS]
    assert [f"{name}.ipynb" for name in list_notebooks()] == NOTEBOOKS


@pytest.mark.parametrize("name", list_configs())
def test_a_configuration_is_loaded_by_name_from_any_folder(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name, by_path = (jobs.load_job_config(p) for p in (name, ROOT / "configs" / f"{name}.toml"))
    assert by_name == by_path


def test_a_file_in_the_current_folder_comes_before_a_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_mirrored").write_text("[training]\nsteps = 7\n")
    assert jobs.load_job_config("digits_mirrored").values.training.steps == 7


@pytest.mark.parametrize("near", ["digits_mirrored.toml", "configs/digits_mirrored.toml"])
def test_a_changed_copy_in_the_current_folder_is_not_passed_over(
    near: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / near
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes((ROOT / "configs" / "digits_mirrored.toml").read_bytes())
    assert jobs.load_job_config("digits_mirrored").values.training.steps == 600
    copy.write_text("[training]\nsteps = 7\n")
    with pytest.raises(ConfigError, match=f"'{near}' differs from the one that comes with jaxdist"):
        find_config("digits_mirrored")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("digits_miror", "Did you mean 'digits_mirrored'?"),
        ("configs/digits_mirrored.toml", "Did you mean 'digits_mirrored'?"),
        ("qqq", "Pass the path of a TOML file, or one of the names"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_names(
    given: str,
    advice: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", given]) == 2
    message = capsys.readouterr().err
    assert advice in message
    assert all(name in message for name in list_configs())


def test_the_command_lists_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    printed = capsys.readouterr().out
    words = set(printed.split())
    assert words >= {*list_configs(), *list_notebooks()}
    assert max(map(len, printed.splitlines())) <= 80


def test_copies_are_complete_and_have_no_link_to_a_file_that_is_not_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "mine"]) == 0
    wanted = [*(f"configs/{name}" for name in CONFIGS), *(f"notebooks/{n}" for n in NOTEBOOKS)]
    assert sorted(capsys.readouterr().out.split()) == sorted(f"mine/{name}" for name in wanted)
    assert _list_files(tmp_path / "mine") == sorted(wanted)
    assert (tmp_path / "mine" / "configs" / CONFIGS[0]).read_bytes() == (
        ROOT / "configs" / CONFIGS[0]
    ).read_bytes()
    for name in NOTEBOOKS:
        copy, first = (
            json.loads((folder / "notebooks" / name).read_text())
            for folder in (tmp_path / "mine", ROOT)
        )
        for cell, before in zip(copy["cells"], first["cells"], strict=True):
            if cell["cell_type"] == "code":
                assert cell == before
                continue
            for link in read_links("".join(cell["source"])):
                is_there = (tmp_path / "mine" / "notebooks" / link).exists()
                assert link.startswith("https://") or is_there, f"{name}: {link}"


@pytest.mark.parametrize("there", ["configs", "notebooks"])
def test_nothing_is_copied_where_one_of_the_folders_is_there(
    there: str, tmp_path: pathlib.Path
) -> None:
    (tmp_path / there).mkdir()
    (tmp_path / there / "mine.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=f"has '{there}' already"):
        copy_examples(tmp_path)
    assert _list_files(tmp_path) == [f"{there}/mine.txt"]


def test_the_command_prints_the_places_of_copies_for_a_file_address(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", (tmp_path / "mine").as_uri()]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(
        str(path) for path in (tmp_path / "mine").rglob("*") if path.is_file()
    )


def test_a_copy_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = pathlib.Path.rename

    def fail(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if self.name == "notebooks":
            raise OSError("the disk is full")
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fail)
    with pytest.raises(ArgumentError, match="the disk is full"):
        copy_examples(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_has_them_in_its_own_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_ROOTS", (tmp_path, ROOT))
    assert sorted(list_configs()) == [name.removesuffix(".toml") for name in CONFIGS]
    copy_examples(tmp_path)
    assert {path.parents[1] for path in list_notebooks().values()} == {tmp_path}


@pytest.mark.slow
def test_the_wheel_has_the_package_and_the_examples_and_nothing_else(
    tmp_path: pathlib.Path,
) -> None:
    hatchling = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel")
    builder = hatchling.WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    examples = {n for n in names if n.startswith(("jaxdist/_examples/c", "jaxdist/_examples/n"))}
    examples = {n for n in examples if not n.endswith(".py")}
    assert examples == {
        *(f"jaxdist/_examples/configs/{name}" for name in CONFIGS),
        *(f"jaxdist/_examples/notebooks/{name}" for name in NOTEBOOKS),
    }
    there = {os.path.join("jaxdist", name) for name in _list_files(ROOT / "jaxdist")}
    assert names - examples == {n for n in there if not re.search(r"__pycache__|\.pyc$", n)}


def test_a_bucket_is_refused_and_no_folder_is_made(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "gs://bucket/mine"]) == 2
    assert "which has the scheme 'gs'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
