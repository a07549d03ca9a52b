"""Programs of the pages that use another tool belong to `make test-tools`, which has run them."""

import pathlib
import subprocess
from typing import Any

import pytest

from tools import other_tools
from tools.other_tools import TOOLS

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = other_tools.read_records((ROOT / other_tools.RECORDS).read_text())
# The others have tests only.
ON_PAGES = {
    "datasets",
    "equinox",
    "grain",
    "mlflow",
    "optuna",
    "pandas",
    "tensorboard",
    "tensorflow",
    "torch",
    "transformers",
    "wandb",
}


def test_each_title_of_a_program_is_a_tool_that_make_test_tools_runs() -> None:
    assert other_tools.name_tools_of_pages() == ON_PAGES
    assert {*TOOLS} >= ON_PAGES
    for tool in TOOLS:
        if tool not in ON_PAGES:
            assert other_tools.find_programs(tool) == []


@pytest.mark.parametrize("tool", sorted(ON_PAGES))
def test_what_the_pages_show_has_run_with_each_tool(tool: str) -> None:
    record = RECORDS[tool]
    assert record["failed"] == "0"
    assert int(record["passed"]) >= len(other_tools.find_programs(tool))
    assert record["programs"] == other_tools.digest_programs(tool), f"run make test-tools {tool=}"


def test_the_records_can_be_read_and_are_in_order() -> None:
    text = (ROOT / other_tools.RECORDS).read_text()
    for record in RECORDS.values():
        assert other_tools.add_record(text, record) == text
        assert len(record["commit"]) == 40


def test_a_line_is_added_in_order_and_replaces_the_one_of_its_tool() -> None:
    record = dict.fromkeys(other_tools.COLUMNS, "1")
    text = ""
    for tool, passed in ("wandb", "1"), ("torch", "2"), ("wandb", "3"):
        text = other_tools.add_record(text, {**record, "tool": tool, "passed": passed})
    found = other_tools.read_records(text)
    assert [(tool, row["passed"]) for tool, row in found.items()] == [
        ("torch", "2"),
        ("wandb", "3"),
    ]
    with pytest.raises(ValueError, match="names other columns"):
        other_tools.read_records("tool\tpassed\n")


def test_tests_that_failed_or_were_left_out_do_not_count_as_passed() -> None:
    report = (
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure/></testcase>"
        "<testcase name='c'><skipped/></testcase><testcase name='d'><properties/></testcase>"
        "</testsuite></testsuites>"
    )
    assert other_tools.count_outcomes(report) == (2, 2)


def test_a_program_and_its_output_are_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    page = '# A\n\n```py title="torch"\nprint(1)\n```\n\n```text\n1\n```\n\n'
    (tmp_path / "docs" / "a.md").write_text(page + '```py title="torch"\npass\n```\n\nText.\n')
    monkeypatch.setattr(other_tools, "ROOT", tmp_path)
    first, second = other_tools.find_programs("torch")
    assert (first.page, first.line, first.text, first.output) == (
        "docs/a.md",
        4,
        "print(1)\n",
        "1\n",
    )
    assert (second.text, second.output) == ("pass\n", None)
    before = other_tools.digest_programs("torch")
    (tmp_path / "docs" / "a.md").write_text(page.replace("text\n1", "text\n2"))
    assert other_tools.digest_programs("torch") != before


class _Runs:
    """Stands for environments and tests."""

    def __init__(self, outcomes: dict[str, Any]) -> None:
        self.outcomes = outcomes
        self.ran: list[str] = []

    def __call__(self, tool: str) -> tuple[int, int, list[str]]:
        self.ran.append(tool)
        outcome = self.outcomes.get(tool, (1, 0))
        if outcome == "pip":
            raise subprocess.CalledProcessError(1, ["pip", "install", tool])
        return *outcome, ["0.10.2", *["1.0"] * len(TOOLS[tool])]


@pytest.mark.parametrize("changes", ["", "a change that is not committed"])
def test_a_tool_that_fails_does_not_keep_the_others_from_running(
    changes: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = _Runs({"pandas": (1, 2), "wandb": "pip"})
    (tmp_path / "tests" / "records").mkdir(parents=True)
    monkeypatch.setattr(other_tools, "ROOT", tmp_path)
    monkeypatch.setattr(other_tools, "_run", runs)
    monkeypatch.setattr(other_tools, "has_tests", lambda tool: True)
    monkeypatch.setattr(other_tools, "digest_programs", lambda tool: "0" * 16)
    monkeypatch.setattr(other_tools, "find_code", lambda root: ("c" * 40, changes))
    assert other_tools.main([]) == 1
    assert runs.ran == [*TOOLS]
    file = tmp_path / other_tools.RECORDS
    if changes:
        assert not file.exists()
    else:
        records = other_tools.read_records(file.read_text())
        assert [*records] == [tool for tool in TOOLS if tool != "wandb"]
        assert (records["pandas"]["passed"], records["pandas"]["failed"]) == ("1", "2")
    assert other_tools.main(["torch"]) == 0
    assert runs.ran[-1] == "torch"
    assert other_tools.main(["torhc"]) == 2
    assert "There is no tool torhc" in capsys.readouterr().out
