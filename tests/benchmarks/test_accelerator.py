"""The command for one accelerator, on a machine without one: what it says, and a dry run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator._numerics import _OPERATIONS, _units
from benchmarks.accelerator._rows import ROWS
from tools import raises

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The row of contract tests starts pytest after the package is imported, which is too late to
    # record its raises.
    left_out = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", raises.VARIABLE)
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator", *arguments],
        cwd=ROOT,
        env={**kept, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_without_an_accelerator_it_says_so_and_exits_with_3() -> None:
    done = _run()
    assert done.returncode == 3
    assert "No accelerator was found. JAX has cpu devices only." in done.stderr
    assert "--platform cpu" in done.stderr
    assert done.stdout == ""


# Rows whose figures are checks, and take seconds.
QUICK = ("run-1", "donation", "numerics", "contracts")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rows", [QUICK, pytest.param(tuple(ROWS), marks=pytest.mark.long)], ids=["quick", "all"]
)
def test_a_dry_run_prints_every_row_and_says_that_it_is_none(
    rows: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "lines.json"
    done = _run("--platform", "cpu", "--smoke", "--rows", ",".join(rows), "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("DRY RUN on cpu")
    lines: list[dict[str, Any]] = json.loads(file.read_text())["lines"]
    assert {line["row"] for line in lines} == set(rows)
    counts = [line for line in lines if "found" in line]
    assert len(counts) >= 2
    assert all(line["met"] for line in counts), counts


def test_a_check_that_is_not_met_decides_and_a_time_only_with_gate() -> None:
    from benchmarks._lines import CountLine, Need, TimeLine
    from benchmarks.accelerator import __main__ as command

    slow = TimeLine("run-1", "", "a", "b", 2.0, 1.0, (2.0,), 2.0, Need(1.1))
    wrong = CountLine("donation", "", "", "", "0 of 2", "2 of 2")
    right = CountLine("donation", "", "", "", "2 of 2", "2 of 2")
    assert command.exit_code([slow, right], gate=False) == 0
    assert command.exit_code([slow, right], gate=True) == 1
    assert command.exit_code([wrong], gate=False) == 1


def test_a_row_that_fails_is_a_check_that_is_not_met() -> None:
    from benchmarks.accelerator import __main__ as command

    def fails(is_smoke: bool) -> Any:
        raise ZeroDivisionError("planted fault")

    [line] = command._row("x", fails, True)
    assert line.met is False
    assert "ZeroDivisionError: planted fault" in str(line)


def test_an_operation_that_is_off_is_told_by_how_much() -> None:
    import numpy as np

    exact = np.array([1.0, 100.0])
    assert _units(exact, exact, 1e-3) == 0
    assert _units(exact + 1, exact, 1e-3) == pytest.approx(10)
    assert len(_OPERATIONS) == 6


def test_the_page_names_every_row() -> None:
    page = (ROOT / "docs" / "machines" / "accelerator.md").read_text()
    named = set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"(?m)^\| `.*?\|", page))))
    assert named == set(ROWS)
