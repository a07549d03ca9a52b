"""Which files are read, and files that cannot be."""

import json
import re
from pathlib import Path

import pytest

from jaxdist.cli import main
from tests.lint.command import lint_paths

PMAP = "import jax\nstep = jax.pmap(f)\n"


def _write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _notebook(*cells: tuple[str, str | list[str]]) -> str:
    return json.dumps({"cells": [{"cell_type": kind, "source": text} for kind, text in cells]})


def test_a_folder_is_read_without_what_others_have_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.py", "deep/er/b.py", ".hidden/c.py", "env/d.py", "__pycache__/e.py", "f.txt"):
        _write(tmp_path / name, PMAP)
    _write(tmp_path / "env/pyvenv.cfg", "")
    _write(tmp_path / "g.ipynb", _notebook(("code", PMAP)))
    (tmp_path / "circle").symlink_to(tmp_path)
    found = lint_paths(tmp_path, tmp_path / "a.py")
    assert [Path(one.path).name for one in found] == ["a.py", "b.py", "g.ipynb"]
    assert main(["lint", str(tmp_path), str(tmp_path / "a.py")]) == 1
    assert capsys.readouterr().out.endswith("\n3 findings in 3 of 3 files.\n")


def test_a_file_that_is_named_is_read_whatever_its_name_is(tmp_path: Path) -> None:
    [one] = lint_paths(_write(tmp_path / "script", PMAP))
    assert (one.path, one.line, one.column) == (f"{tmp_path}/script", 2, 8)


def test_a_finding_in_a_notebook_names_the_cell_and_the_line_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "%matplotlib inline\n!pip install \\\n  jaxdist \\\n  flax\nif True:\n    %time\n"
    first += "[a, *b] = !ls {x}\ntotal = 1 + \\\n    2\n"
    other = "%%bash\nfor f in *; do echo $f; done\n"
    last = ["import jax\n", "\n", "step = jax.pmap(f)\n", "k = jax.pmap(f)  # jaxdist: ignore"]
    text = _notebook(("code", first), ("markdown", "# jax.pmap("), ("code", other), ("code", last))
    path = _write(tmp_path / "n.ipynb", text)
    [one] = lint_paths(path)
    assert (one.path, one.cell, one.line, one.column) == (str(path), 4, 3, 8)
    assert main(["lint", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:cell 4:3:8:")


@pytest.mark.parametrize(
    ("name", "text", "line", "said"),
    [
        ("a.py", "import jax\ndef f(:\n", 2, "Python cannot parse this: invalid syntax"),
        ("a.py", b"\xff\xfe\x00", 1, "cannot read the file as text"),
        ("a.py", b"x = 1\n\0\n", 1, "null bytes"),
        ("a.py", b"# coding: klingon\n", 1, "unknown encoding"),
        ("a.ipynb", "{}", 1, "not a notebook: KeyError('cells')"),
        ("a.ipynb", "import jax", 1, "not a notebook: JSONDecodeError"),
        ("a.ipynb", b"\xff", 1, "cannot read the file as text"),
        ("a.ipynb", '{"cells": [3]}', 1, "not a notebook: TypeError"),
        ("a.ipynb", _notebook(("code", "x"), ("code", "x\nx = = 1")), 1, "cell 2, line 2: Python"),
    ],
)
def test_a_file_that_is_no_program_is_a_finding_and_the_others_are_read(
    tmp_path: Path, name: str, text: str | bytes, line: int, said: str
) -> None:
    bad, good = _write(tmp_path / name, text), _write(tmp_path / "b.py", PMAP)
    one, other = lint_paths(bad, good)
    assert (one.code, one.line, other.code) == ("JD000", line, "JD004")
    assert said in one.found


def test_an_empty_file_and_a_file_in_another_encoding_are_read(tmp_path: Path) -> None:
    latin = _write(tmp_path / "a.py", "# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    assert lint_paths(latin, _write(tmp_path / "b.py", ""), _write(tmp_path / "c.py", "\n\n")) == []


def test_a_path_that_does_not_exist_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", str(tmp_path / "gone.py")]) == 2
    said = capsys.readouterr().err
    assert re.search(r"(?s)The file or folder.*does not exist.*The current folder is /", said)


def test_a_folder_without_programs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path / "notes.txt", "")
    assert main(["lint", str(tmp_path)]) == 2
    assert re.search(r"(?s)The folder .* has no programs", capsys.readouterr().err)
