"""The commands of the page "From a notebook to a pod" run, one after the other in one folder."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.test_documentation import ROOT, read_blocks

PAGE = ROOT / "docs" / "machines" / "notebook-to-pod.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: pathlib.Path) -> None:
    blocks = [b for b in read_blocks(PAGE.read_text()) if b.language == "bash"]
    # A page finds both on the PATH.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "jaxdist").write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxdist "$@"\n')
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    paths = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = "\n".join(line for block in blocks for line in block.lines)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env={**os.environ, **paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # One process and two have the same result, and only one of the two shows epochs.
    results = re.findall(r"^(?:\[(\d)\] )?held out: (.+)$", done.stdout, re.MULTILINE)
    assert sorted(number for number, _ in results) == ["", "0", "1"]
    assert len({text for _, text in results}) == 1
    assert len(re.findall(r"^\[\d\] epoch 10/10", done.stdout, re.MULTILINE)) == 1
    assert "Plan of train_step for v5e:4x4: 16 chips" in done.stdout
    folder = tmp_path / "flowers"
    assert "#SBATCH --ntasks=16" in (folder / "job.sh").read_text()
    assert "kind: JobSet" in (folder / "job.yaml").read_text()
    assert "H100" in (folder / "task.yaml").read_text()
    assert "process 0 of 1" in done.stdout
