"""The old programs of the porting pages (`py` blocks) run where their packages are installed.

The new programs are `python` blocks, which `test_documentation.py` runs. Both print the same.
"""

import ast
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import pytest

from tests.test_documentation import PAGES, ROOT, Block, check_printed, read_blocks

OLD = [
    (page, block, after)
    for page in PAGES
    for block, after in itertools.pairwise([*read_blocks(page.read_text()), Block("", 0, ())])
    if block.language == "py"
]
IDS = [page.stem for page, _, _ in OLD]


def _list_packages(program: str) -> set[str]:
    """The packages that a program imports."""
    names = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize(("page", "block", "after"), OLD, ids=IDS)
def test_an_old_program_prints_what_its_page_says(
    page: pathlib.Path, block: Block, after: Block, tmp_path: pathlib.Path
) -> None:
    assert after.language == "text", f"{page}: the program is followed by what it prints"
    program = tmp_path / "old.py"
    program.write_text("\n".join(block.lines))
    missing = {p for p in _list_packages(program.read_text()) if not importlib.util.find_spec(p)}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert check_printed("\n".join(after.lines) + "\n", done.stdout), done.stdout


@pytest.mark.parametrize(("page", "block", "after"), OLD, ids=IDS)
def test_the_new_program_prints_the_numbers_of_the_old_one(
    page: pathlib.Path, block: Block, after: Block
) -> None:
    # A page may show more programs after these two.
    blocks = read_blocks(page.read_text())[:4]
    assert [b.language for b in blocks] == ["py", "text", "python", "text"]
    assert [b.lines for b in blocks if b.language == "text"] == [after.lines, after.lines]


def test_there_is_a_page_for_each_library() -> None:
    assert sorted(IDS) == [
        "accelerate",
        "pmap",
        "pytorch-ddp",
        "shard-map",
        "tf-distribute-program",
    ]
    assert {page.parent for page, _, _ in OLD} == {ROOT / "docs" / "porting"}
