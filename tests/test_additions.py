"""The additions of `tools.additions` work in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdist
from tools.additions import ADDITIONS, Addition

PACKAGE = Path(jaxdist.__file__).parent


def _run(package: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
    }
    # `-P`: the tree in which the tests run must not come before the copy.
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=package.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda a: a.kind)
def test_an_addition_touches_only_the_files_that_it_lists(
    addition: Addition, tmp_path: Path
) -> None:
    package = tmp_path / "jaxdist"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert addition.missing in _run(package, addition.program).stderr

    addition.apply(package)
    after = _run(package, addition.program)

    assert after.returncode == 0, after.stderr
    assert len(set(addition.files)) == len(addition.files)


def test_an_edit_of_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"a\.py has 'y = 2' 0 times"):
        Addition("nothing", {}, {"a.py": (("y = 2", "y = 3"),)}, "", "").apply(tmp_path)
