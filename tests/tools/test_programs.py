"""The programs of the pages that use a tool run, and print what their page says."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.test_documentation import check_printed
from tools.other_tools import Program, find_programs

PROGRAMS = find_programs(os.environ.get("JAXDIST_TOOL", ""))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}:{p.line}")
def test_a_program_prints_what_its_page_says(program: Program, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program.text)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert check_printed(program.output or "", done.stdout), done.stdout
