"""`jaxdist lint` as a command: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest

from jaxdist.cli import main

PROGRAM = "import jax\nstep = jax.pmap(f)\n"


def test_findings_are_printed_with_place_rule_fix_and_page_and_exit_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    Path("right.py").write_text("import jaxdist\n")
    assert main(["lint", "."]) == 1
    place, rule, fix, page, count = capsys.readouterr().out.splitlines()
    assert place.startswith("train.py:2:8: JD004 pmap: jax.pmap compiles for arrays")
    assert rule.startswith("    rule: strategy.run takes global arrays")
    assert fix.startswith("    fix: call strategy.run(step, args)")
    assert page == "    see: docs/porting/coming-from-jax.md#what-run-compiles-to"
    assert count == "1 finding in 1 of 2 files."


def test_a_right_program_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "right.py"
    path.write_text("import jaxdist\n")
    assert main(["lint", str(path)]) == 0
    assert capsys.readouterr().out == "Nothing found in 1 file.\n"
    assert main(["lint", str(path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_json_has_all_parts_of_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    assert main(["lint", str(path), "--format", "json"]) == 1
    [record] = json.loads(capsys.readouterr().out)
    assert {k: record[k] for k in ("path", "cell", "line", "column", "code", "name")} == {
        "path": str(path),
        "cell": None,
        "line": 2,
        "column": 8,
        "code": "JD004",
        "name": "pmap",
    }
    assert all(record[k] for k in ("found", "rule", "fix", "page"))


def test_a_file_that_python_cannot_parse_exits_with_2_after_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("def f(:\n")
    (tmp_path / "b.py").write_text(PROGRAM)
    assert main(["lint", str(tmp_path)]) == 2
    printed = capsys.readouterr().out
    assert "a.py:1:7: JD000 unreadable: Python cannot parse this: invalid syntax." in printed
    assert "b.py:2:8: JD004" in printed
    assert "2 findings in 2 of 2 files." in printed


@pytest.mark.parametrize("arguments", [[], ["x.py", "--format", "xml"], ["--fix", "x.py"]])
def test_arguments_that_are_not_understood_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", *arguments])
    assert ended.value.code == 2
    assert "usage: jaxdist" in capsys.readouterr().err


def test_a_file_that_does_not_exist_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "no_such.py"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxdist lint: The file or folder 'no_such.py' does not exist")
    assert captured.out == ""


def test_help_lists_the_rules_and_how_to_switch_one_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "JD001 double-reduction" in printed
    assert "# jaxdist: ignore[JD001]" in printed


def test_on_a_terminal_the_same_words_are_coloured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[red]train.py"
    path.write_text(PROGRAM)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = []
    # rich takes the output for a terminal then.
    for is_forced in ("1", ""):
        monkeypatch.setenv("FORCE_COLOR", is_forced)
        assert main(["lint", str(path)]) == 1
        shown.append(capsys.readouterr().out)
    coloured, plain = shown
    assert "\x1b[" in coloured
    assert "\x1b[" not in plain
    assert f"{path}:2:8: JD004 pmap" in plain
