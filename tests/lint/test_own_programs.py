"""The repository's own programs have no findings, except those that are there on purpose."""

import pathlib
import re

import pytest

from jaxdist.cli import main
from tests.lint.command import Finding, lint_paths, lint_text
from tests.test_documentation import PAGES, as_program, read_blocks

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ["benchmarks", "jaxdist", "notebooks", "tests", "tools"]
# Programs of other libraries, which ours are compared with.
OF_OTHERS = {"JD003", "JD004", "JD006"}
# What is wrong on purpose, since a test or page is about it.
ON_PURPOSE = {
    ("docs/sharp-bits.md", "JD002"),  # an uneven mean, which is an error there
    ("docs/porting/pmap.md", "JD002"),  # a port of such a program; the page says what to do
    ("tests/collectives/test_gradients.py", "JD001"),  # an all-reduce of an all-reduce
    ("tests/parameter_server/strategy/test_version_1_workers.py", "JD008"),
    ("tests/program/arguments/test_exact.py", "JD008"),
    ("tests/program/state/test_divided_metrics.py", "JD010"),
    ("tests/program/uneven/test_later_batches.py", "JD002"),
    ("tests/program/virtual/test_deterministic.py", "JD002"),
}


def _record(one: Finding) -> tuple[str, str]:
    return str(pathlib.Path(one.path).relative_to(ROOT)), one.code


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_the_findings_that_are_there_on_purpose(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Lines of any length, so that each finding begins with its place and its code.
    monkeypatch.setenv("COLUMNS", "10000")
    main(["lint", str(ROOT / folder)])
    printed = capsys.readouterr().out
    files = re.findall(r"(?:of|found in) (\d+) files\.$", printed)
    assert int(files[-1]) >= len(list((ROOT / folder).glob("*.py")))
    found = re.findall(rf"^{ROOT}/(\S+?):(?:cell \d+:)?\d+:\d+: (JD\d+)", printed, re.M)
    has_others = folder in {"benchmarks", "tests"}
    own = {(path, code) for path, code in found if not (has_others and code in OF_OTHERS)}
    assert own == {one for one in ON_PURPOSE if one[0].startswith(f"{folder}/")}


def test_programs_of_other_libraries_have_findings() -> None:
    found = lint_paths(ROOT / "benchmarks")
    assert {
        ("benchmarks/_tensorflow.py", "JD006"),
        ("benchmarks/row_07_step_vs_gspmd_and_pmap.py", "JD004"),
    } <= {_record(one) for one in found}


def test_pages_have_the_findings_that_are_there_on_purpose() -> None:
    found: set[tuple[str, str]] = set()
    for page in PAGES:
        blocks = read_blocks(page.read_text())
        if any(block.language == "python" for block in blocks):
            findings = lint_text(as_program(blocks))
            found |= {(str(page.relative_to(ROOT)), f.code) for f in findings}
    assert found == {one for one in ON_PURPOSE if one[0].endswith(".md")}
