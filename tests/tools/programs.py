"""Runs a program of a page, with lines after it."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from tools.other_tools import find_programs


def run_with(tool: str, number: int, lines: str, folder: pathlib.Path) -> Any:
    """Run a program of a tool in a folder, and return the JSON that the lines print last."""
    (folder / "program.py").write_text(find_programs(tool)[number].text + "\n" + lines)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
