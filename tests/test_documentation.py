"""README and docs/ tell the truth: links lead somewhere, code runs, output is printed.

In a page, all `python` blocks run in order as one program, in a process of its own where a warning
is an error. A `text` block that directly follows a `python` block is what that block prints
(`...` stands for anything, as in a doctest). `py` blocks are programs of other libraries, which
`documentation/test_old_programs.py` runs; those with a title, such as `py title="torch"`, are whole
programs that use another tool, which `make test-tools` runs.
"""

import dataclasses
import doctest
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tools.other_tools import TOOLS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "text", "bash", "toml", "py"} | {f'py title="{tool}"' for tool in TOOLS}
COLUMNS = 80
MARK = "\x00block "


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, and where its first line stands in the page (from 0)."""

    language: str
    start: int
    lines: tuple[str, ...]

    @property
    def end(self) -> int:
        """Index of the closing fence."""
        return self.start + len(self.lines)


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    blocks = []
    language: str | None = None
    start = 0
    held: list[str] = []
    for number, line in enumerate(text.splitlines()):
        if not line.startswith("```"):
            held.append(line)
        elif language is None:
            language, start, held = line[3:], number + 1, list[str]()
        else:
            blocks.append(Block(language, start, tuple(held)))
            language = None
    return blocks


def as_program(blocks: list[Block]) -> str:
    """The python blocks as one program whose line numbers are those of the page."""
    lines = [""] * (max(block.end for block in blocks) + 1)
    for number, block in enumerate(blocks):
        if block.language == "python":
            lines[block.start - 1] = f"print({MARK!r} + '{number}')"
            lines[block.start : block.end] = block.lines
    return "\n".join(lines)


def expected_outputs(blocks: list[Block]) -> dict[int, str]:
    """For each python block that a text block follows at once: what it should print."""
    return {
        number: "\n".join(after.lines) + "\n"
        for number, (block, after) in enumerate(itertools.pairwise(blocks))
        if block.language == "python" and after.language == "text" and after.start - block.end <= 3
    }


def check_printed(wanted: str, got: str) -> bool:
    """Whether a program has printed what its page says."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(wanted, got, options)


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def read_links(text: str) -> list[str]:
    """Where the links of a page lead."""
    return re.findall(r"\]\(([^)]+)\)", _without_blocks(text))


def _links(page: pathlib.Path) -> list[str]:
    return read_links(page.read_text())


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: pathlib.Path) -> None:
    for link in _links(page):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"{link}: no such file"
        assert not anchor or anchor in _anchors(there.read_text()), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[pathlib.Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = [x.partition("#")[0] for x in _links(page) if not x.startswith("https://")]
            waiting += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_says_what_it_is_so_that_none_escapes_being_run(page: pathlib.Path) -> None:
    assert {block.language for block in read_blocks(page.read_text())} <= LANGUAGES


def list_wide_lines(text: str) -> list[str]:
    """Lines of blocks that a reader would have to scroll to see."""
    return [line for block in read_blocks(text) for line in block.lines if len(line) > COLUMNS]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_of_code_and_of_output_fit_into_80_columns(page: pathlib.Path) -> None:
    assert list_wide_lines(page.read_text()) == []


def test_a_wide_line_of_a_block_is_found_and_one_of_prose_is_not() -> None:
    wide, fits = "x" * 81, "x" * 80
    assert list_wide_lines(f"{wide}\n```text\n{fits}\n{wide}\n```\n{wide}\n") == [wide]


@pytest.mark.parametrize("page", [p for p in PAGES if "```python\n" in p.read_text()], ids=_name)
def test_code_of_the_page_runs_and_prints_what_the_page_says(
    page: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    blocks = read_blocks(page.read_text())
    # Not the name of a package that the page imports.
    program = tmp_path / f"page_{page.stem}.py"
    program.write_text(as_program(blocks))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    printed = {
        int(number): output
        for number, _, output in (part.partition("\n") for part in done.stdout.split(MARK)[1:])
    }
    for number, wanted in expected_outputs(blocks).items():
        got = printed[number]
        line = blocks[number].start
        assert check_printed(wanted, got), f"block at line {line} prints:\n{got}"
        printed.pop(number)
    silent = {blocks[n].start: output for n, output in printed.items() if output.strip()}
    assert silent == {}, "these blocks print something that the page does not show"


def test_planted_output_that_is_not_printed_is_found() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    blocks = read_blocks(page)
    assert expected_outputs(blocks) == {0: "2\n"}
    assert as_program(blocks).splitlines()[1] == "print(1)"


def test_readme_has_exactly_two_commands_and_ci_runs_the_one_for_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = ["\n".join(b.lines) for b in read_blocks(readme) if b.language == "bash"]
    assert len(commands) == 2
    assert "jaxdist train" in commands[0]
    assert "pytest" in commands[1]
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "run"), "--print-test-command"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.strip() == commands[1]


def test_the_home_page_begins_with_the_example_of_the_readme() -> None:
    first, home = (read_blocks((ROOT / p).read_text()) for p in ("README.md", "docs/index.md"))
    assert [block.lines for block in home[:2]] == [block.lines for block in first[:2]]


def test_every_wheel_that_is_named_and_the_citation_have_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    places = [*PAGES, ROOT / "tools" / "notebooks.py"]
    wheels = [re.findall(r"jaxdist-([\d.]+)-py3-none-any\.whl", p.read_text()) for p in places]
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert {*itertools.chain(*wheels), *cited} == {version}


# The changelog names files of earlier versions.
NAMING = [page for page in PAGES if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", NAMING, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: pathlib.Path) -> None:
    named = re.findall(r"`([\w.]+(?:/[\w.]+)+\.py)`", page.read_text())
    gone = [f for f in named if not any((root / f).exists() for root in (ROOT, ROOT / "jaxdist"))]
    assert gone == []
