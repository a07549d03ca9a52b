"""The repository's own programs have no findings, except those that are there on purpose."""

import pathlib

import pytest

from jaxdist._lint import Located, lint_paths, lint_text
from jaxdist.cli._lint import spell
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


def _record(one: Located) -> tuple[str, str]:
    return str(one.path.relative_to(ROOT)), one.finding.rule.code


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_the_findings_that_are_there_on_purpose(folder: str) -> None:
    found, files = lint_paths([ROOT / folder], spell)
    assert files >= len(list((ROOT / folder).glob("*.py")))
    has_others = folder in {"benchmarks", "tests"}
    own = {_record(one) for one in found if not (has_others and one.finding.rule.code in OF_OTHERS)}
    assert own == {one for one in ON_PURPOSE if one[0].startswith(f"{folder}/")}


def test_programs_of_other_libraries_have_findings() -> None:
    found, _ = lint_paths([ROOT / "benchmarks"], spell)
    assert {
        ("benchmarks/_tensorflow.py", "JD006"),
        ("benchmarks/row_07_step_vs_gspmd_and_pmap.py", "JD004"),
    } <= {_record(one) for one in found}


def test_pages_have_the_findings_that_are_there_on_purpose() -> None:
    found: set[tuple[str, str]] = set()
    for page in PAGES:
        blocks = read_blocks(page.read_text())
        if any(block.language == "python" for block in blocks):
            findings = lint_text(as_program(blocks), spell)
            found |= {(str(page.relative_to(ROOT)), f.rule.code) for f in findings}
    assert found == {one for one in ON_PURPOSE if one[0].endswith(".md")}
